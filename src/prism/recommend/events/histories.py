"""Histories: all users' events in three flat arrays, and rows of consecutive events cut out of them.

User u's events are at offsets[u] … offsets[u + 1] - 1 of the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from prism.files import write_atomically

MAPPED_BYTES = 1 << 28
"""Files of this size or more are mapped into memory instead of read."""
EVENTS_PER_BLOCK = 1 << 22
"""Most events handled at once where all of them are gone through."""
NO_SEQUENCE = "no user has 2 or more events: there is no sequence to learn from"
_DTYPES = {"I64": np.int64, "F64": np.float64}


@dataclass(frozen=True)
class Histories:
    """Events of U users, N in total, each user's in the order they happened.

    offsets int64 `[U + 1]`; items int64 `[N]`, 1 … number of items (0 is "no item" everywhere);
    times float64 `[N]`, or None if the events have no times;
    profiles int64 `[U, W]`, codes of the users' features (`Users.profiles`), or None if they have none.

    The arrays of a large file are mapped, not read: the system loads and drops their pages as they are used.
    """

    offsets: np.ndarray
    items: np.ndarray
    times: np.ndarray | None = None
    profiles: np.ndarray | None = None

    def __post_init__(self) -> None:
        offsets, items = self.offsets, self.items
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError("offsets must be one ascending row of integers that starts with 0")
        if items.shape != (offsets[-1],):
            raise ValueError(f"items must have shape [{offsets[-1]}] (the last offset), got {list(items.shape)}")
        if self.times is not None and self.times.shape != items.shape:
            raise ValueError(f"times must have the shape of items, {list(items.shape)}, got {list(self.times.shape)}")
        if self.profiles is not None and len(self.profiles) != len(self):
            raise ValueError(f"profiles must have one row for each of the {len(self)} users, got {len(self.profiles)}")

    def __len__(self) -> int:
        """Number of users."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Events of each user, int64 `[U]`."""
        return np.diff(self.offsets)

    def user(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """One user's items and times, as views."""
        events = slice(self.offsets[index], self.offsets[index + 1])
        return self.items[events], None if self.times is None else self.times[events]

    def take(self, users: np.ndarray) -> Histories:
        """The histories of these users, in this order."""
        users = np.asarray(users, dtype=np.int64)
        profiles = None if self.profiles is None else self.profiles[users]
        return self._gather(self.offsets[users], self.lengths[users], profiles)

    def head(self, ends: np.ndarray) -> Histories:
        """The first `ends[u]` events of every user; ends int64 `[U]`."""
        return self._gather(self.offsets[:-1], np.minimum(ends, self.lengths), self.profiles)

    def counts(self, num_items: int) -> np.ndarray:
        """How often each item occurs, int64 `[num_items + 1]`."""
        return np.bincount(self.items, minlength=num_items + 1)

    def to_bytes(self) -> bytes:
        """The contents of a safetensors file."""
        arrays = {"offsets": self.offsets, "items": self.items}
        if self.times is not None:
            arrays["times"] = self.times
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    def save(self, path: Path) -> None:
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Histories:
        try:
            arrays = map_file(path) if path.stat().st_size > MAPPED_BYTES else load_file(path)
            offsets, items = arrays["offsets"], arrays["items"]
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return cls(offsets, items, arrays.get("times"))

    def blocks(self, most: int = EVENTS_PER_BLOCK) -> Iterator[tuple[int, int]]:
        """Ranges of users with at most `most` events together (or one user): what is computed for all needs little memory."""
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self.offsets, self.offsets[first] + most, "right")) - 1
            last = min(max(last, first + 1), len(self))
            yield first, last
            first = last

    def _gather(self, starts: np.ndarray, lengths: np.ndarray, profiles: np.ndarray | None) -> Histories:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        items = np.empty(offsets[-1], dtype=self.items.dtype)
        times = None if self.times is None else np.empty(offsets[-1], dtype=self.times.dtype)
        gathered = Histories(offsets, items, times, profiles)
        for first, last in gathered.blocks():
            part = slice(offsets[first], offsets[last])
            places = np.arange(part.start, part.stop)
            places += np.repeat(starts[first:last] - offsets[first:last], lengths[first:last])
            items[part] = self.items[places]
            if times is not None and self.times is not None:
                times[part] = self.times[places]
        return gathered


def map_file(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, mapped into memory and read-only."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    arrays = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            if 8 + size + stop > path.stat().st_size:
                raise ValueError(f"{path} is damaged: it ends within {name}")
            mapped = np.memmap(path, _DTYPES[entry["dtype"]], "r", 8 + size + start, tuple(entry["shape"]))
            arrays[name] = np.asarray(mapped)
    return arrays


@dataclass(frozen=True)
class PaddedEvents:
    """Rows of consecutive events, padded at the end: places in the flat arrays, items, mask, gaps, all `[B, T]`.

    profiles: codes of the rows' users `[B, W]`, or None.
    """

    places: np.ndarray
    items: np.ndarray
    mask: np.ndarray
    gaps: np.ndarray | None
    profiles: np.ndarray | None = None


def gather_events(histories: Histories, starts: np.ndarray, counts: np.ndarray, length: int) -> PaddedEvents:
    """Rows of `counts[b]` ≤ length events, from place `starts[b]` of the flat arrays; a row must stay within one user."""
    steps = np.arange(length)
    mask = steps < counts[:, None]
    places = np.where(mask, starts[:, None] + steps, 0)
    gaps = None
    if histories.times is not None:
        before = np.maximum(places - 1, 0)
        gaps = np.where(mask, histories.times[places] - histories.times[before], 0)
        users = np.searchsorted(histories.offsets, starts, "right") - 1
        gaps[histories.offsets[users] == starts, 0] = 0  # a user's first event: the one before it is another user's
        gaps = gaps.astype(np.float32)
    return PaddedEvents(places, np.where(mask, histories.items[places], 0), mask, gaps)


def contexts(histories: Histories, users: np.ndarray, ends: np.ndarray, length: int) -> PaddedEvents:
    """The last `length` events before event `ends[b]` of user `users[b]`; T is the longest row's length."""
    first = histories.offsets[users]
    counts = np.minimum(ends, length)
    events = gather_events(histories, first + ends - counts, counts, int(counts.max(initial=1)))
    return events if histories.profiles is None else replace(events, profiles=histories.profiles[users])
