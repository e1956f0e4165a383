"""Items that were not chosen: what a loss that does not look at all items looks at instead.

A sampler draws from torch's global random numbers of the device it draws on, so that whoever saves and restores those
resumes exactly. Drawing is with replacement. A target that is drawn as its own negative is the losses' business: they
leave it out.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Negatives(NamedTuple):
    """What was drawn for M targets."""

    items: Tensor
    """`[S]`, shared by all targets (then scores are one matrix product), or `[M, S]`, each target's own."""
    log_expected: Tensor | None
    """As `items`: the logarithm of how often each was expected to be drawn, S · q; None: no correction."""


class Sampler(Protocol):
    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        """`count` negatives for targets `[M]` (0: none), on their device; `own`: for each target its own."""
        ...


class Uniform:
    """Every item alike."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        items = torch.randint(1, self.num_items + 1, _shape(targets, count, own), device=targets.device)
        return Negatives(items, torch.full(items.shape, math.log(count / self.num_items), device=items.device))


class Popularity:
    """By how often items occur in the training data, `counts` `[N + 1]`, to the power `power`. An item that does not occur
    is never drawn."""

    def __init__(self, counts: Any, power: float = 1.0) -> None:
        weights = torch.as_tensor(counts).double() ** power
        weights[0] = 0.0
        if not bool((weights[1:] > 0).any()):
            raise ValueError("counts must say how often each item occurs, [N + 1]: all are 0")
        weights[torch.as_tensor(counts) == 0] = 0.0  # a power of 0 would make them 1
        self.share = weights / weights.sum()
        self.cumulative = self.share.cumsum(0)

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        self._move(targets.device)
        at = torch.rand(_shape(targets, count, own), dtype=torch.float64, device=targets.device)
        # Less than the last sum, whatever rounding does to it; `right` steps over items that do not occur.
        items = torch.searchsorted(self.cumulative, at * (self.cumulative[-1] * (1 - 1e-15)), right=True)
        return Negatives(items, self.log_expected(items, count))

    def log_expected(self, items: Tensor, count: int) -> Tensor:
        return (self.share[items] * count).log().float()

    def _move(self, device: torch.device) -> None:
        if self.share.device != device:
            self.share, self.cumulative = self.share.to(device), self.cumulative.to(device)


class InBatch(Popularity):
    """Other targets of the batch. They come by their popularity, `counts` `[N + 1]`, which the correction therefore knows."""

    def __init__(self, counts: Any) -> None:
        super().__init__(counts)

    def draw(self, targets: Tensor, count: int, own: bool = False) -> Negatives:
        self._move(targets.device)
        shape = _shape(targets, count, own)
        picked = torch.multinomial((targets > 0).float(), math.prod(shape), replacement=True)
        items = targets[picked].reshape(shape)
        return Negatives(items, self.log_expected(items, count))


SAMPLERS = ("uniform", "popularity", "in_batch")


def sampler(name: str, num_items: int, counts: Any = None) -> Sampler:
    """By name; all but uniform need `counts` `[N + 1]`."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown negatives {name!r}: choose from {', '.join(SAMPLERS)}")
    if name == "uniform":
        return Uniform(num_items)
    if counts is None:
        raise ValueError(f"negatives {name!r} need counts, how often each item occurs")
    return Popularity(counts) if name == "popularity" else InBatch(counts)


def _shape(targets: Tensor, count: int, own: bool) -> tuple[int, ...]:
    if count < 1:
        raise ValueError(f"the count of negatives must be at least 1, got {count}")
    return (targets.numel(), count) if own else (count,)
