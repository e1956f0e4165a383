"""`PrismRecConfig`, the configuration of recommenders, and two published recommenders as changes to its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from prism import rules
from prism.models.auto import register
from prism.models.config import PrismConfig, check_probabilities
from prism.nn.pattern import parse_layers
from prism.rules.rule import check_integers


class PrismRecConfig(PrismConfig):
    """A language model's configuration whose tokens are items: any rule, any hybrid of rules.

    Args:
        num_items: number of items, 1 … num_items; 0 is padding, so that `vocab_size` is num_items + 1.
        hidden_size, num_heads, layers, num_hidden_layers: as in `PrismConfig`, with defaults for recommenders.
        time_gaps: whether the input of an event includes the time since the previous event.
        item_features: `{name: number of codes}` of categorical features of items (a category, a brand); each item has one
            code 0 … number - 1. Their embeddings are added to the items' vectors, in input and output. Sorted by name, as in
            config.json.
        item_lists: `{name: [number of codes, longest list]}` of features with several values per item (genres, tags); code
            0 is none. The mean of the embeddings is added.
        item_vectors: `{name: size}` of vectors that are given for every item (of a text, of an image). A learned linear map
            of each is added.
        user_features: `{name: [number of codes, longest list]}` of features of users; code 0 is none. The sum of their
            (mean) embeddings is read before a user's first event, as if it were an event.
        id_dropout: probability, in training, that an item has only its features and no embedding as itself. New items,
            which have none, are then scored by what the features have learned.
        grown_from: hash of the configuration before items were added; see resize.py.
        max_length: number of events per history in training. Not a limit; evaluation uses it as a default.
        embedding_scale: factor of the items' vectors in the input (not the output); √hidden_size in SASRec.
        kwargs: further arguments of `PrismConfig`: `rule_options` (with those of `_as_measured`), `intermediate_size`,
            `dropout` (here also of the input), `initializer_range` …
    """

    model_type: ClassVar[str] = "prism_rec"

    def __init__(
        self,
        num_items: int = 1000,
        hidden_size: int = 64,
        num_heads: int = 2,
        layers: str | Sequence[Any] = "prism",
        num_hidden_layers: int | None = None,
        *,
        time_gaps: bool = False,
        item_features: dict[str, int] | None = None,
        item_lists: dict[str, Sequence[int]] | None = None,
        item_vectors: dict[str, int] | None = None,
        user_features: dict[str, Sequence[int]] | None = None,
        id_dropout: float = 0.0,
        grown_from: str | None = None,
        max_length: int = 200,
        embedding_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        sizes: dict[str, Any] = {"num_items": num_items, "max_length": max_length}
        for kind, single in {"item_features": item_features, "item_vectors": item_vectors}.items():
            sizes |= {f"{kind}[{name!r}]": count for name, count in (single or {}).items()}
        for kind, several in {"item_lists": item_lists, "user_features": user_features}.items():
            for name, pair in (several or {}).items():
                if len(pair) != 2:
                    raise ValueError(f"{kind}[{name!r}] must be [number of codes, longest list], got {pair!r}")
                sizes |= {f"{kind}[{name!r}][{place}]": value for place, value in enumerate(pair)}
        check_integers(**sizes)
        check_probabilities(id_dropout=id_dropout)
        if kwargs.pop("vocab_size", num_items + 1) != num_items + 1:
            raise ValueError("vocab_size of a recommender is num_items + 1: leave it out")
        if not kwargs.pop("tie_word_embeddings", True):
            raise ValueError("tie_word_embeddings must be True: an item has one vector, in and out")
        self.num_items = num_items
        self.time_gaps = time_gaps
        self.item_features = dict(sorted((item_features or {}).items()))
        self.item_lists = {name: list(pair) for name, pair in sorted((item_lists or {}).items())}
        self.item_vectors = dict(sorted((item_vectors or {}).items()))
        self.user_features = {name: list(pair) for name, pair in sorted((user_features or {}).items())}
        self.id_dropout = id_dropout
        self.grown_from = grown_from
        self.max_length = max_length
        self.embedding_scale = embedding_scale
        kwargs.setdefault("pad_token_id", 0)
        super().__init__(num_items + 1, hidden_size, num_heads, layers, num_hidden_layers, **kwargs)
        self.rule_options = _as_measured(self.layers, self.rule_options)

    def _get_generation_parameters(self) -> dict[str, Any]:
        """No generation parameters: transformers would take `max_length` for one and refuse to save it."""
        return {}


def _as_measured(layers: str | Sequence[Any], given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options by rule, with those that recommenders were measured with where the rules' defaults are others.

    They are SiLU as PRISM's output gate (a sigmoid is better on text) and full steps of Titans' single tokens.
    """
    plan, chosen = parse_layers(layers), dict(given)
    for rule in {layer.rule for layer in plan}:
        has = [{**given.get(rule, {}), **options} for name, options in plan if name == rule]
        gate = rules.get(rule).option_parameters().get("gate_by")
        measured: dict[str, Any] = {}
        if gate is not None and gate.default is None and all(one.get("preset", "lm") == "lm" for one in has):
            measured = {"gate_by": "silu"}
        elif rule == "titans" and all(one.get("mini_batch") == 1 and one.get("momentum", True) for one in has):
            measured = {"base_lr": 1.0}
        if measured:
            chosen[rule] = {**measured, **given.get(rule, {})}
    return chosen


SASREC = {"layers": "softmax", "num_hidden_layers": 2, "dropout": 0.2}
HSTU = {"layers": "hstu", "num_hidden_layers": 2, "intermediate_size": 0, "dropout": 0.2}
"""The published recommenders, as changes to the defaults of `PrismRecConfig`."""


def sasrec(num_items: int, **settings: Any) -> PrismRecConfig:
    """SASRec (Kang and McAuley, 2018): softmax attention, here with rotary positions and SwiGLUs instead of learned positions
    and ReLUs."""
    return PrismRecConfig(num_items, **{**SASREC, **settings})


def hstu(num_items: int, **settings: Any) -> PrismRecConfig:
    """HSTU (Zhai et al., 2024): pointwise attention with a relative bias, no feed-forward layers."""
    return PrismRecConfig(num_items, **{**HSTU, **settings})


register(PrismRecConfig, AutoModel="prism.recommend.model:PrismForRecommendation")
