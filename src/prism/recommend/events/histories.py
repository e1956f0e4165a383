"""All users' histories as three flat arrays: user u's events are the stretch offsets[u] … offsets[u + 1]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from prism.files import write_atomically


@dataclass(frozen=True)
class Histories:
    """Events of U users, N in all, each user's in the order they happened.

    offsets int64 `[U + 1]`; items int64 `[N]`, 1 … number of items (0 stands for "no item" everywhere);
    times float64 `[N]`, or None for a log without times.
    """

    offsets: np.ndarray
    items: np.ndarray
    times: np.ndarray | None = None

    def __post_init__(self) -> None:
        offsets, items = self.offsets, self.items
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError("offsets must be one ascending row of numbers that starts with 0")
        if items.shape != (offsets[-1],):
            raise ValueError(f"items must have shape [{offsets[-1]}], as offsets say, got {list(items.shape)}")
        if self.times is not None and self.times.shape != items.shape:
            raise ValueError(f"times must have the shape of items, {list(items.shape)}, got {list(self.times.shape)}")

    def __len__(self) -> int:
        """Number of users."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Events of each user, int64 `[U]`."""
        return np.diff(self.offsets)

    def user(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """One user's items and times, as views."""
        stretch = slice(self.offsets[index], self.offsets[index + 1])
        return self.items[stretch], None if self.times is None else self.times[stretch]

    def take(self, users: np.ndarray) -> Histories:
        """These users, in this order."""
        users = np.asarray(users, dtype=np.int64)
        return self._gather(self.offsets[users], self.lengths[users])

    def head(self, ends: np.ndarray) -> Histories:
        """All users, each with only the first `ends[u]` events; ends int64 `[U]`."""
        return self._gather(self.offsets[:-1], np.minimum(ends, self.lengths))

    def counts(self, num_items: int) -> np.ndarray:
        """How often each item occurs, int64 `[num_items + 1]`."""
        return np.bincount(self.items, minlength=num_items + 1)

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        arrays = {"offsets": self.offsets, "items": self.items}
        if self.times is not None:
            arrays["times"] = self.times
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    def save(self, path: Path) -> None:
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path) -> Histories:
        try:
            arrays = load_file(path)
            offsets, items = arrays["offsets"], arrays["items"]
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return cls(offsets, items, arrays.get("times"))

    def _gather(self, starts: np.ndarray, lengths: np.ndarray) -> Histories:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Histories(offsets, self.items[places], None if self.times is None else self.times[places])
