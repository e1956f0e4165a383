"""`PrismConfig`: the configuration of every model, that of a language model by its defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from prism import rules
from prism.engine.memory import check_choice
from prism.models.compat import warn_of_missing
from prism.nn.pattern import LayerSpec, parse_layers
from prism.rules.rule import check_integers, check_nonnegative


class PrismConfig(PreTrainedConfig):
    """One configuration for every rule and every hybrid of rules.

    Args:
        vocab_size: number of tokens; 256 is one per byte.
        hidden_size: width of the model.
        num_heads: number of heads of every mixer (a layer may override it with the option `heads`).
        layers: a pattern such as `"prism*3+softmax"`, or a list of rules (see prism/nn/pattern.py): one period.
        num_hidden_layers: number of layers; the period is repeated, and truncated, to that many. By default one period.
        rule_options: options by rule, `{"prism": {"steps": 3}, "softmax": {"kv_heads": 2}}`; options of a layer in the list
            override them.
        intermediate_size: width of the SwiGLU; by default 8/3 of the width, rounded up to a multiple of 64. 0: no SwiGLUs.
        dropout: dropout probability of the output of every mixer and SwiGLU.
        norm_eps: epsilon of the norms between mixers and SwiGLUs.
        initializer_range: initial standard deviation of embeddings and linear maps; rules initialise their gates.
        tie_word_embeddings: whether input and output embeddings are one matrix.
        use_cache: whether a forward pass outside training returns its state.
        form, backend: how every layer computes its memory, as in `prism.memory`; `"auto"` leaves the choice to
            `prism.engine.using` around the call, or to the engine.
    """

    model_type: ClassVar[str] = "prism"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}
    on_creation: ClassVar[list[Callable[[PrismConfig], None]]] = []
    """Called with every new configuration (see auto.py)."""

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 512,
        num_heads: int = 4,
        layers: str | Sequence[Any] = "prism",
        num_hidden_layers: int | None = None,
        *,
        rule_options: dict[str, dict[str, Any]] | None = None,
        intermediate_size: int | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        form: str = "auto",
        backend: str = "auto",
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_integers(vocab_size=vocab_size, hidden_size=hidden_size, num_heads=num_heads)
        check_nonnegative(norm_eps=norm_eps, initializer_range=initializer_range)
        check_probabilities(dropout=dropout)
        check_choice(form, backend)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_hidden_layers = len(parse_layers(layers, num_hidden_layers))
        self.layers = layers if isinstance(layers, str) else [_as_json(entry) for entry in layers]
        self.rule_options = {} if rule_options is None else rule_options
        self.intermediate_size = -(-hidden_size * 8 // 3 // 64) * 64 if intermediate_size is None else intermediate_size
        self.dropout = dropout
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range
        self.tie_word_embeddings = tie_word_embeddings
        self.use_cache = use_cache
        self.form = form
        self.backend = backend
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        super().__init__(**kwargs)
        self._check_rule_options()
        for call in self.on_creation:
            call(self)

    @property
    def layer_plan(self) -> list[LayerSpec]:
        """Every layer's rule and the options that `layers` and `rule_options` give."""
        plan = parse_layers(self.layers, self.num_hidden_layers)
        return [LayerSpec(rule, {**self.rule_options.get(rule, {}), **options}) for rule, options in plan]

    @property
    def constant_state(self) -> bool:
        """Whether memory use in generation is independent of the context length; False if a layer caches every token."""
        return all(rules.get(layer.rule).constant_state for layer in self.layer_plan)

    def _check_rule_options(self) -> None:
        if not isinstance(self.rule_options, dict):
            raise ValueError(f"rule_options must be a dict of options by rule, got {self.rule_options!r}")
        used = {layer.rule for layer in parse_layers(self.layers)}
        for rule, options in self.rule_options.items():
            if rule not in used:
                raise ValueError(f"rule_options names {rule!r}, which is not in layers: {', '.join(sorted(used))}")
            if not isinstance(options, dict):
                raise ValueError(f"rule_options[{rule!r}] must be a dict of options, got {options!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrismConfig) and self._contents() == other._contents()

    def _contents(self) -> dict[str, Any]:
        """The contents that would be saved, without the path it was loaded from."""
        return {name: value for name, value in self.to_diff_dict().items() if name != "_name_or_path"}

    __hash__ = None  # type: ignore[assignment]  # not hashable: equal by contents, which can change


def _as_json(entry: Any) -> Any:
    """A pair (name, options) as a list, as JSON stores it."""
    return list(entry) if isinstance(entry, tuple) else entry


def check_probabilities(**options: float) -> None:
    """Raise a ValueError for a probability of dropout that is not at least 0 and less than 1."""
    for name, value in options.items():
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}")


warn_of_missing(PreTrainedConfig)
