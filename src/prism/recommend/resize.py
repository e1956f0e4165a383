"""Growth: a recommender with more items and more values of features, whose old items keep their vectors and scores.

Item i stays row i, and so do the codes of values; new ones come after them. New rows of a table of embeddings start at the mean
of the old ones. New items of a model that was trained with `id_dropout` start at zero: that is how it has seen items which
have only their features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.models.loading import config_sha256
from prism.recommend.config import PrismRecConfig
from prism.recommend.model import PrismForRecommendation

IDS = "model.embed_tokens.weight"
"""Name of the items' embeddings."""


def grow_model(model: PrismForRecommendation, **sizes: Any) -> PrismForRecommendation:
    """A copy of the model with more items or more values of features; call `describe_items` on it.

    States of users that the model has made stay valid for the copy.

    Args:
        sizes: new values of the configuration's `num_items`, `item_features`, `item_lists` and `user_features`.
    """
    stored = {**model.config.to_dict(), **sizes, "grown_from": config_sha256(model)}
    stored.pop("vocab_size", None)
    config = PrismRecConfig(**stored)
    grown = PrismForRecommendation(config)
    torch.nn.Module.to(grown, device=model.item_counts.device, dtype=model.dtype)
    old = model.state_dict()
    grown.load_state_dict({name: grow(name, old[name], new, config) for name, new in grown.state_dict().items()})
    return grown.eval()


@torch.no_grad()
def grow(name: str, old: Tensor, new: Tensor, config: PrismRecConfig) -> Tensor:
    """A tensor of the model in the shape of `new`, by its name in the state dict: old entries first, then new ones."""
    if old.shape == new.shape:
        return old.clone()
    if old.ndim != new.ndim or any(a > b for a, b in zip(old.shape, new.shape, strict=True)):
        raise ValueError(f"{name} cannot shrink from {list(old.shape)} to {list(new.shape)}")
    grown = padded(old, new.shape)
    if name.endswith(".weight") and len(old) > 1 and not (name == IDS and config.id_dropout):
        grown[len(old) :] = old[1:].mean(0)  # row 0 is padding, or no value
    return grown


def padded(old: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A tensor with zeros after its entries, in every dimension: the moments of new rows are zero."""
    grown = torch.zeros(shape, dtype=old.dtype, device=old.device)
    grown[tuple(slice(size) for size in old.shape)] = old
    return grown
