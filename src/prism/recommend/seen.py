"""SeenItems: which items users had, exactly and in little space; part of their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prism.recommend.events.histories import Histories
from prism.recommend.filters import Excluded

_NAMES = ("offsets", "items")


@dataclass(frozen=True)
class SeenItems:
    """The distinct items of n users, 4 bytes each; always on the CPU.

    User u's items are items[offsets[u]] … items[offsets[u + 1] - 1], rows of the catalogue, ascending.
    offsets int64 `[n + 1]`; items int32 `[S]`.
    """

    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def none(cls, users: int) -> SeenItems:
        return cls(np.zeros(users + 1, np.int64), np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.items.nbytes

    def user(self, user: int) -> np.ndarray:
        """The items of one user, ascending."""
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def add(self, histories: Histories) -> SeenItems:
        """With the items of new events of the same users."""
        if not len(histories.items):
            return self
        stride = int(max(histories.items.max(), self.items.max(initial=0))) + 1
        had = np.repeat(np.arange(len(self)), np.diff(self.offsets)) * stride + self.items
        new = np.unique(np.repeat(np.arange(len(self)), histories.lengths) * stride + histories.items)
        places = np.searchsorted(had, new)
        fresh = np.ones(len(new), dtype=bool)
        inside = places < len(had)
        fresh[inside] = had[places[inside]] != new[inside]
        keys = np.insert(had, places[fresh], new[fresh])
        offsets = np.searchsorted(keys, np.arange(len(self) + 1) * stride)
        return SeenItems(offsets.astype(np.int64), (keys % stride).astype(np.int32))

    def excluded(self) -> Excluded:
        """The items as pairs of user and item."""
        return Excluded(len(self), np.repeat(np.arange(len(self)), np.diff(self.offsets)), self.items.astype(np.int64))

    def index_select(self, users: np.ndarray) -> SeenItems:
        """These users, in this order."""
        picked = Histories(self.offsets, self.items).take(users)
        return SeenItems(picked.offsets, picked.items)

    @staticmethod
    def concatenate(parts: Sequence[SeenItems]) -> SeenItems:
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return SeenItems(offsets, np.concatenate([part.items for part in parts]))

    def tensors(self) -> dict[str, Tensor]:
        """For a file, by names that start with `seen.`."""
        return {f"seen.{name}": torch.from_numpy(getattr(self, name)) for name in _NAMES}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], users: int) -> SeenItems:
        """From the tensors of a file; no items if it has none of them, as of a service, which keeps items elsewhere."""
        if "seen.items" not in tensors:
            return cls.none(users)
        return cls(*(tensors[f"seen.{name}"].numpy() for name in _NAMES))
