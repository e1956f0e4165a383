"""Training samples: stretches of users' histories, each event with the one after it, as rows of one length.

Real events stand at the start of a row and padding after them, so a causal model needs no mask to read the events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from prism.recommend.events.histories import Histories


@dataclass(frozen=True)
class RecBatch:
    """inputs and targets int64 `[B, T]`, 0 where there is none; mask bool `[B, T]`: real events; gaps float32 `[B, T]` or
    None: time since the user's event before (0 for the very first); users int64 `[B]`: rows of the histories."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    gaps: Tensor | None
    users: Tensor

    def tensors(self) -> dict[str, Tensor]:
        held = {name: getattr(self, name) for name in ("inputs", "targets", "mask", "gaps", "users")}
        return {name: value for name, value in held.items() if value is not None}

    def __getitem__(self, rows: slice | Tensor) -> RecBatch:
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device) -> RecBatch:
        return self._map(lambda x: x.to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> RecBatch:
        gaps = None if self.gaps is None else function(self.gaps)
        return RecBatch(function(self.inputs), function(self.targets), function(self.mask), gaps, function(self.users))


class Samples:
    """What a recommender is trained on.

    Args:
        length: events read in one sample at the most; `width`, the T of batches, is less where all histories are shorter.
        order: "windows": a user's whole history, cut from its end into stretches of length + 1 events that overlap by
            one, so that every event but a user's first is a target exactly once, however long the history;
            "last": only the last length + 1 events of each user, as in SASRec.
    """

    def __init__(self, histories: Histories, length: int, order: Literal["windows", "last"] = "windows") -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1 event, got {length}")
        if order not in ("windows", "last"):
            raise ValueError(f"order must be 'windows' or 'last', got {order!r}")
        self.histories = histories
        targets = np.maximum(histories.lengths - 1, 0)  # every event but the first
        stretches = -(-targets // length) if order == "windows" else np.minimum(targets, 1)
        self._users = np.repeat(np.arange(len(histories)), stretches)
        if not len(self._users):
            raise ValueError("there is nothing to learn from: no user has 2 or more training events")
        from_end = np.arange(len(self._users)) - np.repeat(np.cumsum(stretches) - stretches, stretches)
        ends = histories.offsets[1:][self._users] - 1 - from_end * length  # place of the last target
        self._starts = np.maximum(ends - length, histories.offsets[self._users])
        self._counts = ends - self._starts
        self.width = int(self._counts.max())

    def __len__(self) -> int:
        return len(self._users)

    def targets(self, indices: np.ndarray) -> int:
        """How many real targets these samples have together."""
        return int(self._counts[indices].sum())

    def batch(self, indices: np.ndarray) -> RecBatch:
        """These samples, in this order."""
        indices = np.asarray(indices)
        starts, counts = self._starts[indices], self._counts[indices]
        events = gather_events(self.histories, starts, counts, self.width)
        following = np.minimum(events.places + 1, len(self.histories.items) - 1)
        return RecBatch(
            inputs=torch.from_numpy(events.items),
            targets=torch.from_numpy(np.where(events.mask, self.histories.items[following], 0)),
            mask=torch.from_numpy(events.mask),
            gaps=None if events.gaps is None else torch.from_numpy(events.gaps),
            users=torch.from_numpy(self._users[indices]),
        )


@dataclass(frozen=True)
class PaddedEvents:
    """Rows of consecutive events, padded at the end: places in the histories, items, mask, gaps, all `[B, T]`."""

    places: np.ndarray
    items: np.ndarray
    mask: np.ndarray
    gaps: np.ndarray | None


def gather_events(histories: Histories, starts: np.ndarray, counts: np.ndarray, length: int) -> PaddedEvents:
    """`counts[b]` ≤ length events from place `starts[b]` of the flat arrays on; a stretch lies within one user."""
    steps = np.arange(length)
    mask = steps < counts[:, None]
    places = np.where(mask, starts[:, None] + steps, 0)
    gaps = None
    if histories.times is not None:
        before = np.maximum(places - 1, 0)
        gaps = np.where(mask, histories.times[places] - histories.times[before], 0)
        users = np.searchsorted(histories.offsets, starts, "right") - 1
        gaps[histories.offsets[users] == starts, 0] = 0  # a user's first event: before it stands another user's
        gaps = gaps.astype(np.float32)
    return PaddedEvents(places, np.where(mask, histories.items[places], 0), mask, gaps)


def contexts(histories: Histories, users: np.ndarray, ends: np.ndarray, length: int) -> PaddedEvents:
    """The last `length` events before event `ends[b]` of user `users[b]`, as rows of the longest one's length."""
    first = histories.offsets[users]
    counts = np.minimum(ends, length)
    return gather_events(histories, first + ends - counts, counts, int(counts.max(initial=1)))
