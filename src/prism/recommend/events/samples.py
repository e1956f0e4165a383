"""Training samples: users' histories cut into sequences of one length, each event with the next one as its target.

Real events come first in a row and padding last, so a causal model needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from prism.recommend.events.histories import Histories, gather_events


@dataclass(frozen=True)
class RecBatch:
    """A batch of B samples of T events.

    inputs, targets: int64 `[B, T]`, 0 for padding.
    mask: bool `[B, T]`, True for real events.
    gaps: float32 `[B, T]` or None, time since the user's previous event (0 for the first).
    users: int64 `[B]`, rows of the histories.
    profiles: int64 `[B, W]` or None, codes of the users' features.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    gaps: Tensor | None
    users: Tensor
    profiles: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        tensors = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in tensors.items() if value is not None}

    def __getitem__(self, rows: slice | Tensor) -> RecBatch:
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device) -> RecBatch:
        pin = device.type == "cuda"  # from pageable memory, CUDA lets the host wait for the work queued before the copy
        return self._map(lambda x: (x.pin_memory() if pin and not x.is_cuda else x).to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> RecBatch:
        return replace(self, **{name: function(value) for name, value in self.tensors().items()})


class Samples:
    """The samples that a recommender is trained on.

    Args:
        length: most events in one sample; `width`, the T of batches, is smaller if all histories are shorter.
        order: "windows": a user's whole history, cut from its end into sequences of length + 1 events that overlap by
            one, so that every event but a user's first is a target exactly once, for any length of history;
            "last": only the last length + 1 events of each user, as in SASRec.
    """

    def __init__(self, histories: Histories, length: int, order: Literal["windows", "last"] = "windows") -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1 event, got {length}")
        if order not in ("windows", "last"):
            raise ValueError(f"order must be 'windows' or 'last', got {order!r}")
        self.histories = histories
        targets = np.maximum(histories.lengths - 1, 0)  # every event but the first
        per_user = -(-targets // length) if order == "windows" else np.minimum(targets, 1)
        self._users = np.repeat(np.arange(len(histories)), per_user)
        if not len(self._users):
            raise ValueError("no user has 2 or more training events: there is nothing to learn from")
        from_end = np.arange(len(self._users)) - np.repeat(np.cumsum(per_user) - per_user, per_user)
        ends = histories.offsets[1:][self._users] - 1 - from_end * length  # place of the last target
        self._starts = np.maximum(ends - length, histories.offsets[self._users])
        self._counts = ends - self._starts
        self.width = int(self._counts.max())

    def __len__(self) -> int:
        return len(self._users)

    def reaching(self, first: np.ndarray) -> np.ndarray:
        """Which samples have a target at or after position `first[u]` of their user's history, bool `[samples]`."""
        last = self._starts + self._counts - self.histories.offsets[self._users]
        return last >= first[self._users]

    def targets(self, indices: np.ndarray) -> int:
        """Number of real targets in these samples."""
        return int(self._counts[indices].sum())

    def batch(self, indices: np.ndarray) -> RecBatch:
        """A batch of these samples, in this order."""
        indices = np.asarray(indices)
        starts, counts = self._starts[indices], self._counts[indices]
        events = gather_events(self.histories, starts, counts, self.width)
        profiles = self.histories.profiles
        following = np.minimum(events.places + 1, len(self.histories.items) - 1)
        return RecBatch(
            inputs=torch.from_numpy(events.items),
            targets=torch.from_numpy(np.where(events.mask, self.histories.items[following], 0)),
            mask=torch.from_numpy(events.mask),
            gaps=None if events.gaps is None else torch.from_numpy(events.gaps),
            users=torch.from_numpy(self._users[indices]),
            profiles=None if profiles is None else torch.from_numpy(profiles[self._users[indices]]),
        )
