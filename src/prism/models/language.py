"""One language model for all rules: embeddings, a stack of blocks, a norm, a head.

Design choices
- A layer is a `Block` around a `Mixer`; which rule it runs is configuration. There is no modelling file per mechanism.
- Positions belong to the rules that use them, so `position_ids` only say where packed documents start (at 0).
- The cache holds the mixers' states. A forward pass creates new ones. One plain token per row takes a shorter way
  (models/decode.py), in `generate` and wherever else the model is called for one.
- Initialisation draws every parameter in full, on the CPU, in one order, independent of the model's device and sharding: the
  same seed gives the same model. Gates and other weights that a rule sets itself are initialised by the rule.
- Weights are safetensors. Pickles are never opened, because they can run code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from prism.engine import token, using
from prism.engine.compat import is_unmodified
from prism.engine.memory import resolve
from prism.engine.sequence_parallel import Context
from prism.models.cache import PrismCache
from prism.models.compat import is_loaded, require_marks, tokens_to_record, warn_of_missing
from prism.models.config import PrismConfig
from prism.models.cross_entropy import next_token_loss
from prism.models.decode import next_logits
from prism.models.flags import document_starts_of, padding_mask
from prism.models.rollback import Inputs
from prism.nn.block import Block, Merged, may_defer, place_options
from prism.nn.parameters import aligned_weights, assign, gates, initial_weights
from prism.nn.pattern import LayerSpec
from prism.nn.state import State


class PrismLayer(GradientCheckpointingLayer, Block):
    """A block built from the configuration, with its position in the stack."""

    def __init__(self, config: PrismConfig, index: int, spec: LayerSpec) -> None:
        options = {**place_options(spec.rule, index, config.num_hidden_layers), **spec.options}
        heads = options.pop("heads", config.num_heads)
        sizes = (config.hidden_size, heads, config.intermediate_size, config.norm_eps, config.dropout)
        super().__init__(spec.rule, *sizes, **options)


class PrismPreTrainedModel(PreTrainedModel):
    """Base of PRISM's transformers models: initialisation and loading of weights."""

    config_class = PrismConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PrismLayer"]  # noqa: RUF012  (declared this way by transformers)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012  (likewise)

    def post_init(self) -> None:
        self._keep_in_fp32_modules_strict = set(gates(self))
        super().post_init()

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        # As for a model of transformers itself: without the shortcut for custom code that ignores loaded weights.
        super()._initialize_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module. Called for children first, so that a rule's own values override the general case."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            _initialise(
                module.weight, lambda shape: torch.normal(0.0, self.config.initializer_range, shape, device="cpu")
            )
            _initialise(getattr(module, "bias", None), lambda shape: torch.zeros(shape, device="cpu"))
        elif isinstance(module, nn.RMSNorm):
            _initialise(module.weight, lambda shape: torch.ones(shape, device="cpu"))
        elif isinstance(module, PrismLayer):
            own = dict(module.mixer.rule.named_parameters())
            if not all(is_loaded(parameter) for parameter in own.values()):
                for values in (initial_weights, aligned_weights):
                    for name, value in values(module.mixer.rule).items():
                        _initialise(own[name], lambda shape, value=value: value)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> PrismPreTrainedModel:
        require_marks()
        _refuse_pickles(pretrained_model_name_or_path, kwargs)
        kwargs["use_safetensors"] = True
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        """Save configuration and weights, of which those stored by columns (`loading.by_columns`) are stored by rows again."""
        for parameter in self.parameters():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        return super().save_pretrained(*arguments, **options)


class PrismModel(PrismPreTrainedModel):
    """Tokens in, hidden states out."""

    def __init__(self, config: PrismConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PrismLayer(config, i, spec) for i, spec in enumerate(config.layer_plan))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PrismCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        reset: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        shared: dict[str, Tensor] | None = None,
        removable: int = 0,
        context: Context | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states `[B, T, hidden_size]`, and with `use_cache` the states after the last token.

        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, hidden_size]` instead.
            attention_mask: `[B, T]`, or `[B, tokens in the cache + T]`; 0 is padding, on either side or between. Omit a mask
                without padding when training on a GPU: its values are not read there, and the path with padding is slower.
            position_ids: `[B, T]`; a document starts where one is 0, if need be after padding. For no other use: rules count.
            past_key_values: the cache that an earlier call returned.
            reset: `[B, T]` bool, the same as `position_ids == 0`. Omit it too where no document starts.
            shared: a new dict that is passed from layer to layer; a mixture of memories stores its balance loss there.
            removable: number of last tokens that a recording cache can `crop` after this call (0: all).
            context: the processes over which the sequences are cut; the tokens are this process's part, without padding.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds, not both and not none")
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        if given.ndim != (2 if inputs_embeds is None else 3):
            raise ValueError(
                f"input_ids must be [B, T], or inputs_embeds [B, T, hidden_size], got shape {list(given.shape)}"
            )
        B, T = given.shape[:2]
        if past_key_values is not None and not isinstance(past_key_values, PrismCache):
            raise ValueError(f"past_key_values must be a PrismCache, got {type(past_key_values).__name__}")
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: list[Any] = past_key_values.states if past_key_values is not None else []
        if states and len(states) != len(self.layers):
            raise ValueError(f"past_key_values has {len(states)} layers, the model {len(self.layers)}")
        mask = padding_mask(attention_mask, B, T)
        fresh = past_key_values is None or not past_key_values.is_initialized
        reset = document_starts_of(reset, position_ids, mask, B, T, fresh and (context is None or context.first))
        shared = {} if shared is None else shared
        cache = None
        if past_key_values is not None and past_key_values.rolls_back:
            cache = past_key_values if use_cache else None
            run = partial(self._run, use_cache=use_cache, output_hidden_states=output_hidden_states, context=context)
            inputs = Inputs(given, mask, reset)
            x, hidden = past_key_values.read(inputs, removable or T, run, shared, self.embed_tokens, update=use_cache)
        else:
            x, new, hidden = self._run(given, states, mask, reset, shared, use_cache, output_hidden_states, context)
            if use_cache:
                cache = PrismCache() if past_key_values is None else past_key_values
                cache.update(new, T)
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=(*hidden, x) if output_hidden_states else None,
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def decode(
        self,
        x: Tensor,
        states: Sequence[State],
        shared: dict[str, Tensor],
        weights: Sequence[Merged] | None = None,
        norm: token.ScaledNorm | None = None,
    ) -> tuple[Tensor, list[State]]:
        """One token per row, ids `[B]` or embeddings `[B, hidden_size]` → `[B, hidden_size]` and the states after it.

        The call must be `token.allowed`. Parts that have hooks or were replaced are called.

        Args:
            weights: those of every layer (`Block.merged`), if the model has not changed since.
            norm: what takes the place of the last norm.
        """
        x = self.embed_tokens(x) if x.ndim == 1 else x
        new: list[State] = []
        layers: list[Any] = list(self.layers)
        for i, (layer, state) in enumerate(zip(layers, states, strict=True)):
            if is_unmodified(layer):
                x, state = layer.decode(x, state, shared, None if weights is None else weights[i])
            else:
                y, state = layer(x.unsqueeze(1), state, shared=shared)
                x = y.squeeze(1)
            new.append(state)
        x = self.norm(x) if norm is None else norm(x)
        return x, new

    def _run(
        self,
        x: Tensor,
        states: list[Any],
        mask: Tensor | None,
        reset: Tensor | None,
        shared: dict[str, Tensor],
        use_cache: bool,
        output_hidden_states: bool | None,
        context: Context | None,
    ) -> tuple[Any, list[State], list[Any]]:
        """The stack on ids `[B, T]` or embeddings `[B, T, hidden_size]`: its output, new states, and the layers' inputs."""
        x = self.embed_tokens(x) if x.ndim == 2 else x
        form, backend = resolve(self.config.form, self.config.backend)
        plain = mask is None and reset is None and context is None and not output_hidden_states and not self.training
        if plain and states and use_cache and x.shape[1] == 1 and not torch.compiler.is_compiling():
            with using(form, backend):
                if token.allowed(x):
                    x, decoded = self.decode(x.squeeze(1), states, shared)
                    return x.unsqueeze(1), decoded, []
        hidden: list[Any] = []
        new: list[State] = []
        options: dict[str, Any] = {"form": form, "backend": backend, "context": context}
        # With gradient checkpointing each layer's input is kept: one tensor, not two.
        defers = not output_hidden_states and not self.gradient_checkpointing and may_defer(self.layers)
        for i, (layer, state) in enumerate(zip(self.layers, states or [None] * len(self.layers), strict=True), 1):
            if output_hidden_states:  # only then: keeping them needs memory for layers × tokens
                hidden.append(x)
            defer = defers and i < len(self.layers)
            x, state = layer(x, state, mask, reset, shared, keep_state=use_cache, defer=defer, **options)
            new.append(state)
        return self.norm(x), new, hidden


@dataclass
class PrismOutput(CausalLMOutputWithPast):
    """Output of the language model."""

    balance_loss: Tensor | None = None
    """Load-balance loss of mixtures of memories, weighted and summed over layers; in training `loss` includes it. None without
    such layers."""


class PrismForCausalLM(PrismPreTrainedModel, GenerationMixin):
    """A language model: logits of the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (declared this way by transformers)

    def __init__(self, config: PrismConfig) -> None:
        super().__init__(config)
        self.model = PrismModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights. A tied head may be absent, as in saved files (transformers' Trainer would warn about it)."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        tied = self.lm_head.weight is self.model.embed_tokens.weight
        if tied and head not in state_dict and embedding in state_dict:
            state_dict = {**state_dict, head: state_dict[embedding]}
        return super().load_state_dict(state_dict, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PrismCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        reset: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        context: Context | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> PrismOutput | tuple[Any, ...]:
        """Logits `[B, T, vocab_size]`. Arguments as in `PrismModel.forward`, and

        Args:
            labels: `[B, T]`, the tokens themselves (they are shifted here); -100 is ignored in the loss.
            logits_to_keep: number of last tokens for which logits are computed (0: all), or their indices.
            skip_logits: whether to leave `logits` None. By default in training with labels: the loss does not need them
                (`linear_cross_entropy`), and for a whole batch they would be the largest tensor of the step.
            kwargs: `shift_labels` `[B, T]`, the next tokens, instead of `labels`; `num_items_in_batch`, by which the sum of the
                loss is divided (by default the number of labels that are not ignored; transformers' Trainer passes it),
                `ignore_index` and `z_loss`.
        """
        if labels is not None and context is not None:
            raise ValueError(
                "labels cannot be used with context: the first target of the next part is in another process"
            )
        # Not a parameter: transformers' Trainer expects a column in the data for every one with "label" in its name.
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        if isinstance(past_key_values, PrismCache) and past_key_values.states:
            special = (
                position_ids,
                inputs_embeds,
                labels,
                shift_labels,
                reset,
                output_hidden_states or None,
                skip_logits,
                context,
            )
            plain = use_cache is not False and isinstance(logits_to_keep, int) and all(z is None for z in special)
            decoded = self._decoded(input_ids, attention_mask, past_key_values) if plain else None
            if decoded is not None:
                return decoded if return_dict else decoded.to_tuple()
        shared: dict[str, Tensor] = {}
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            reset,
            output_hidden_states,
            return_dict=True,
            shared=shared,
            removable=logits_to_keep if isinstance(logits_to_keep, int) else 0,
            context=context,
        )
        hidden = out.last_hidden_state
        loss: Any = None
        if labels is not None or shift_labels is not None:
            loss = self._loss(hidden, labels, shift_labels, **kwargs)
            if self.training and "balance_loss" in shared:
                loss = loss + shared["balance_loss"]
        skip = (self.training and loss is not None) if skip_logits is None else skip_logits
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = None if skip else self.lm_head(hidden[:, keep])
        output = PrismOutput(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            balance_loss=shared.get("balance_loss"),
        )
        return output if return_dict else output.to_tuple()

    def _loss(self, hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, **kwargs: Any) -> Tensor:
        """The loss of the next tokens. A loss function set by the user, or a head that was replaced, gets all logits."""
        if self.loss_function is ForCausalLMLoss and type(self.lm_head) is nn.Linear and is_unmodified(self.lm_head):
            return next_token_loss(hidden, self.lm_head, labels, shift_labels, **kwargs)
        if kwargs.get("z_loss"):
            raise ValueError(f"z_loss {kwargs['z_loss']} needs the model's own loss and an unmodified lm_head: omit it")
        given = {"labels": labels, "vocab_size": self.config.vocab_size, "shift_labels": shift_labels}
        loss: Tensor = self.loss_function(logits=self.lm_head(hidden), **given, **kwargs)
        return loss

    def _decoded(self, input_ids: Any, attention_mask: Any, cache: PrismCache) -> PrismOutput | None:
        """The output for one plain token per row; None if the call is not that."""
        if input_ids is None or input_ids.ndim != 2 or input_ids.shape[1] != 1 or self.config.output_hidden_states:
            return None
        if torch.compiler.is_compiling() or padding_mask(attention_mask, len(input_ids), 1) is not None:
            return None
        answer = next_logits(self, input_ids, cache)
        if answer is None:
            return None
        logits: Any = answer[0].unsqueeze(1)
        return PrismOutput(logits=logits, past_key_values=cache, balance_loss=answer[1])

    def prepare_inputs_for_generation(  # type: ignore[override]  # names only the arguments it reads
        self, input_ids: Any, next_sequence_length: int | None = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        if inputs_embeds is None and input_ids.shape[1] == 0:
            raise ValueError(
                f"input_ids must have at least 1 token, got {list(input_ids.shape)}: start an empty text with the end token"
            )
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        seen = 0 if cache is None else cache.get_seq_length()
        if next_sequence_length is None and seen and mask is not None and mask.shape[1] == input_ids.shape[1]:
            next_sequence_length = input_ids.shape[1] - seen  # assisted generation passes all tokens, also read ones
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the cache has seen {seen} tokens, input_ids has {input_ids.shape[1]}: to continue, pass all tokens and then "
                "new ones, or only the new ones with an attention_mask over all"
            )
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]  # from GenerationMixin
            input_ids, next_sequence_length=next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs.pop("position_ids", None)  # counted from the mask by generate; a 0 would start a new document
        return inputs

    def _prepare_cache_for_generation(  # type: ignore[override]  # the other arguments are for growing caches
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any = None, *_: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r} is for growing caches: omit it, "
                "this model has its own cache"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = PrismCache()
        cache, recorded = model_kwargs.get("past_key_values"), tokens_to_record(generation_config, generation_mode)
        if recorded and isinstance(cache, PrismCache):
            cache.activate_past_recording(recorded)
            if cache.tokens and generation_mode == "assisted_generation" and model_kwargs.get("attention_mask") is None:
                # Shows how many of the tokens are new (see prepare_inputs_for_generation); transformers lengthens it.
                model_kwargs["attention_mask"] = torch.ones(1, cache.tokens, dtype=torch.long, device=self.device)


def _initialise(parameter: Tensor | None, draw: Any) -> None:
    """Set a parameter to draw(shape), unless it was loaded from a file."""
    if parameter is not None and not is_loaded(parameter):
        assign(parameter, draw(tuple(parameter.shape)))


def _refuse_pickles(source: Any, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if there are only pickles: opening one can run any code in it."""
    path = Path(str(source))
    pickles = (
        sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt")) if path.is_dir() else []
    )
    if path.is_file() and path.suffix != ".safetensors":
        pickles = [path.name]
    only = path.is_file() or not any(path.glob("*.safetensors"))
    if (pickles and only) or kwargs.get("use_safetensors") is False:
        raise ValueError(
            f"{source} has weights as a pickle ({', '.join(pickles) or 'use_safetensors=False'}), which can run code when "
            "opened: only safetensors are loaded, convert them with safetensors.torch.save_file"
        )


warn_of_missing(PreTrainedModel, GenerationMixin)
