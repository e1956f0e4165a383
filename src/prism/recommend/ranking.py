"""Ranks of targets among candidate items, and the ranking metrics.

Ranks are pessimistic: an item with the same score as the target ranks before it, and any NaN score, the target's or
another item's, counts against the target. A model that gives every item the same score is therefore last, not first.
With one target per prediction, the metrics at k are

    HR@k   = 1 if rank ≤ k                       (hit rate = recall)
    NDCG@k = 1 / log2(1 + rank) if rank ≤ k
    MRR@k  = 1 / rank if rank ≤ k
    AUC    = fraction of the other candidates that the target ranks before
    coverage@k = fraction of all items that are in at least one top-k list
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CUTOFFS = (1, 5, 10, 20, 50, 100, 200, 500)
SCORES_AT_ONCE = 2**25
"""Most scores (users × items) held at once, in evaluation and in serving: a catalogue may have millions of items."""
EVENTS_AT_ONCE = 2**17
"""Most events read at once, for any batch size: histories may have thousands of events."""
_BLOCK = 128


def candidates(num_items: int, targets: Tensor, exclude: Tensor | None = None) -> Tensor:
    """Which items are ranked, bool `[B, num_items + 1]`: all but item 0 and the excluded ones; the target always is.

    Args:
        exclude: items to leave out, int64 `[B, E]`, padded with 0.
    """
    mask = torch.ones(len(targets), num_items + 1, dtype=torch.bool, device=targets.device)
    if exclude is not None:
        mask.scatter_(1, exclude, False)
    mask[:, 0] = False
    return mask.scatter_(1, targets[:, None], True)


def ranks(
    scores: Tensor, targets: Tensor, exclude: Tensor | None = None, candidate_mask: Tensor | None = None
) -> Tensor:
    """Pessimistic ranks of the targets, from 1, int64 `[B]`; scores `[B, N + 1]`, targets int64 `[B]`.

    Args:
        exclude: see `candidates`.
        candidate_mask: the mask of `candidates`, instead of `exclude`.
    """
    if not torch.is_floating_point(scores) or scores.ndim != 2 or targets.shape != scores.shape[:1]:
        raise ValueError(f"scores must be [B, N + 1] and targets [B], got {list(scores.shape)}, {list(targets.shape)}")
    if candidate_mask is None:
        candidate_mask = candidates(scores.shape[1] - 1, targets, exclude)
    own = scores.gather(1, targets[:, None])
    not_below = (scores < own).logical_not_().logical_and_(candidate_mask)
    return count(not_below)  # the target is among them: ranks start from 1


def count(mask: Tensor) -> Tensor:
    """Number of True values in each row: bool `[B, N]` → int64 `[B]`.

    Sums blocks in 8 bits first: torch sums booleans as 64-bit integers, which takes 50 times as long.
    """
    bits = mask.view(torch.uint8)
    whole = bits.shape[1] // _BLOCK * _BLOCK
    blocks = bits[:, :whole].unflatten(1, (-1, _BLOCK)).sum(2, dtype=torch.uint8)
    return blocks.sum(1) + bits[:, whole:].sum(1)


@dataclass(frozen=True)
class Ranking:
    """Ranks of M targets, each among `candidates` items (itself included): int64 `[M]` both."""

    ranks: np.ndarray
    candidates: np.ndarray

    def __post_init__(self) -> None:
        if self.ranks.shape != self.candidates.shape or self.ranks.ndim != 1 or not len(self.ranks):
            raise ValueError("ranks and candidates must be one-dimensional, of the same length, at least 1")

    def __len__(self) -> int:
        return len(self.ranks)

    def take(self, rows: np.ndarray) -> Ranking:
        return Ranking(self.ranks[rows], self.candidates[rows])

    def per_target(self, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, np.ndarray]:
        """Every metric for every target, float64 `[M]`."""
        rank = self.ranks.astype(np.float64)
        metrics = {}
        for name, gain in (("HR", np.ones_like(rank)), ("NDCG", 1 / np.log2(1 + rank)), ("MRR", 1 / rank)):
            for k in cutoffs:
                metrics[f"{name}@{k}"] = np.where(self.ranks <= k, gain, 0.0)
        others = np.maximum(self.candidates - 1, 1)  # a target without rivals: AUC 1
        metrics["AUC"] = 1 - (rank - 1) / others
        return metrics

    def metrics(self, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
        """Every metric, as the mean over the targets."""
        return {name: float(values.mean()) for name, values in self.per_target(cutoffs).items()}

    def standard_errors(self, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
        """Standard errors of the means, as if targets were independent; 0 for a single target."""
        root = len(self) ** 0.5
        spread = {name: float(values.std(ddof=len(self) > 1)) for name, values in self.per_target(cutoffs).items()}
        return {name: value / root for name, value in spread.items()}
