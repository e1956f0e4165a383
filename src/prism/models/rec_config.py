"""What a recommender is, in numbers and rules' names; and the two published ones that others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from prism.models.compat import warn_of_missing
from prism.models.config import PrismConfig


class PrismRecConfig(PrismConfig):
    """A language model's configuration whose tokens are items: any rule, any hybrid of rules.

    Args:
        num_items: how many items there are, 1 … num_items; 0 is padding, so that `vocab_size` is one more.
        hidden_size, num_heads, layers, num_hidden_layers: as in `PrismConfig`, with a recommender's defaults.
        time_gaps: whether an event's input says how long after the one before it came.
        item_features: `{name: number of codes}` of what is known about items (a category, a brand), each item having one
            code 0 … number - 1; they are added to the items' vectors, in and out. Kept in the order of their names, as
            config.json has them.
        max_length: how many events of a history the model was trained on. Not a limit: it is where evaluation starts from.
        embedding_scale: what items' vectors are multiplied by on the way in (not out); √hidden_size in SASRec.
        kwargs: everything else that `PrismConfig` takes: `rule_options`, `intermediate_size`, `dropout` (here also of the
            input), `initializer_range` …
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
        max_length: int = 200,
        embedding_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        features = {} if item_features is None else item_features
        sizes = {"num_items": num_items, "max_length": max_length}
        for name, value in {**sizes, **{f"item_features[{name!r}]": count for name, count in features.items()}}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")
        if kwargs.pop("vocab_size", num_items + 1) != num_items + 1:
            raise ValueError("vocab_size of a recommender is num_items + 1: leave it out")
        if not kwargs.pop("tie_word_embeddings", True):
            raise ValueError("tie_word_embeddings must be True: an item has one vector, in and out")
        self.num_items = num_items
        self.time_gaps = time_gaps
        self.item_features = dict(sorted(features.items()))
        self.max_length = max_length
        self.embedding_scale = embedding_scale
        kwargs.setdefault("pad_token_id", 0)
        super().__init__(num_items + 1, hidden_size, num_heads, layers, num_hidden_layers, **kwargs)

    def _get_generation_parameters(self) -> dict[str, Any]:
        """A recommender writes no text: `max_length` is not what transformers takes it for and refuses to save."""
        return {}


SASREC = {"layers": "softmax", "num_hidden_layers": 2, "dropout": 0.2}
HSTU = {"layers": "hstu", "num_hidden_layers": 2, "intermediate_size": 0, "dropout": 0.2}
"""The published models, as settings over the defaults."""


def sasrec(num_items: int, **settings: Any) -> PrismRecConfig:
    """SASRec (Kang and McAuley, 2018): softmax attention, here with rotary positions and SwiGLUs in place of learned
    positions and of ReLUs."""
    return PrismRecConfig(num_items, **{**SASREC, **settings})


def hstu(num_items: int, **settings: Any) -> PrismRecConfig:
    """HSTU (Zhai et al., 2024): pointwise attention with a relative bias, no feed-forward layers."""
    return PrismRecConfig(num_items, **{**HSTU, **settings})


warn_of_missing(PreTrainedConfig)
