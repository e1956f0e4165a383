"""The order of training samples: a pure function of (seed, i), with no state to save.

The data is cut into n sequences. Sample i is at position i % n of epoch i // n, and every epoch visits the n sequences in
a different order. That order is a keyed bijection of {0 … n-1}, computed element by element: a Feistel network on the
smallest even number of bits that holds n, applied repeatedly until the result is below n (fewer than four times on
average). Nothing is shuffled in memory: any process can compute any sample, and neither resuming nor the number of
processes changes sample i.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6


def sequence_of(samples: np.ndarray, sequences: int, seed: int) -> np.ndarray:
    """The sequence that each sample is: int `[N]` → int64 `[N]`, all in [0, sequences)."""
    if sequences < 1:
        raise ValueError(f"sequences must be at least 1, got {sequences}")
    samples = np.asarray(samples, dtype=np.uint64)
    epochs, positions = np.divmod(samples, np.uint64(sequences))
    keys = _mix(epochs ^ _mix(np.uint64(seed % 2**64)))
    return permute(positions, sequences, keys).astype(np.int64)


class Order:
    """`sequence_of` for consecutive calls: it computes many samples ahead, which takes hardly longer than a few."""

    def __init__(self, sequences: int, seed: int, at_once: int = 1 << 14) -> None:
        self.sequences, self.seed, self.at_once = sequences, seed, at_once
        self._first, self._held = 0, np.empty(0, dtype=np.int64)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The sequence that each sample is; samples must be in ascending order."""
        first, last = int(samples[0]), int(samples[-1])
        if first < self._first or last >= self._first + len(self._held):
            stop = max(last + 1, first + self.at_once)
            self._first, self._held = first, sequence_of(np.arange(first, stop), self.sequences, self.seed)
        return self._held[samples - self._first]


class ReplayOrder:
    """The order of an update: every epoch has all new sequences and, among them, as many old ones as `replayed`.

    The old ones are taken from an endless order of their own, so that each epoch has others. It is a pure function of
    (seed, i) too.

    Args:
        new: sequences to learn from in every epoch, int `[n]`.
        old: sequences to choose the replayed ones from, int `[m]`, m ≥ replayed.
    """

    def __init__(self, new: np.ndarray, old: np.ndarray, replayed: int, seed: int) -> None:
        self.new, self.old, self.replayed, self.seed = new, old, replayed, seed
        self.sequences = len(new) + replayed
        self._mixed = Order(self.sequences, seed)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The sequence that each sample is; samples must be in ascending order."""
        place, epoch = self._mixed(samples), np.asarray(samples) // self.sequences
        is_old = place >= len(self.new)
        found = self.new[np.where(is_old, 0, place)]
        if is_old.any():
            counter = epoch[is_old] * self.replayed + place[is_old] - len(self.new)
            found[is_old] = self.old[sequence_of(counter, len(self.old), self.seed + 1)]
        return found


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of {0 … size-1} for every key: uint64 `[N]`, uint64 `[N]` → uint64 `[N]`."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    result = _feistel(positions, half, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half, keys[outside])
    return result


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    low = np.uint64((1 << int(half)) - 1)
    left, right = x >> half, x & low
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + np.uint64(turn))) & low)
    return (left << half) | right


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """The output function of SplitMix64: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        z = np.atleast_1d(x) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
