"""The items that a user has seen: a sorted array in memory; in the store, that array or a bit for every item."""

from __future__ import annotations

import numpy as np

NONE_SEEN = np.zeros(0, dtype=np.int32)
_ROWS, _BITS = b"r", b"b"


def add_seen(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`seen`, sorted int32 `[m]`, with rows of the catalogue added."""
    rows = np.unique(rows).astype(np.int32)
    places = np.searchsorted(seen, rows)
    inside = places < len(seen)
    fresh = np.ones(len(rows), dtype=bool)
    fresh[inside] = seen[places[inside]] != rows[inside]
    return np.insert(seen, places[fresh], rows[fresh]) if fresh.any() else seen


def pack_seen(seen: np.ndarray, items: int) -> bytes:
    """As bytes, in the shorter of the two forms.

    Args:
        items: number of items of the model.
    """
    if 4 * len(seen) <= items // 8 + 1:
        return _ROWS + seen.astype("<i4").tobytes()
    bits = np.zeros(items + 1, dtype=bool)
    bits[seen] = True
    return _BITS + np.packbits(bits).tobytes()


def unpack_seen(content: bytes) -> np.ndarray:
    """The inverse of `pack_seen`."""
    if content[:1] == _ROWS:
        return np.frombuffer(content, dtype="<i4", offset=1).astype(np.int32)
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8, offset=1))
    return np.flatnonzero(bits).astype(np.int32)
