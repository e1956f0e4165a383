"""Random draws that several synthetic tasks need, for a whole batch at once, on the generator's device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def distinct(rows: int, count: int, pool: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different numbers of 0 … pool - 1 for every row `[rows, count]`, in random order, equally likely.

    A large pool is not shuffled: numbers are drawn one after the other, and those that came before are left out. That is
    the same distribution for O(count log count) work a row.
    """
    if not 0 <= count <= pool:
        raise ValueError(f"count must be between 0 and pool = {pool}, got {count}")
    device = generator.device
    if count and pool <= max(16 * count, 256):
        return torch.multinomial(torch.ones(rows, pool, device=device), count, replacement=False, generator=generator)
    drawn = torch.empty(rows, 0, dtype=torch.long, device=device)
    while True:
        more = torch.randint(pool, (rows, count + count // 8 + 4), generator=generator, device=device)
        drawn = torch.cat([drawn, more], 1)
        ordered, places = drawn.sort(dim=1, stable=True)
        repeated = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        new = torch.empty_like(repeated).scatter_(1, places, ~repeated)
        new &= new.cumsum(1) <= count
        if int(new.sum()) == rows * count:
            return drawn[new].view(rows, count)


def others(taken: Tensor, count: int, pool: int, generator: torch.Generator) -> Tensor:
    """Draw `count` numbers of 0 … pool - 1 for every row `[rows, count]`, equally likely, none of the row's `taken`.

    Args:
        taken: different numbers `[rows, n]`, n < pool.
    """
    ordered = taken.sort(1).values
    n = taken.shape[1]
    ranks = torch.randint(pool - n, (len(taken), count), generator=generator, device=taken.device)
    # The r-th free number is r plus the taken numbers before it: those with fewer than r + 1 free numbers below them.
    free_below = ordered - torch.arange(n, device=taken.device)
    return ranks + torch.searchsorted(free_below.contiguous(), ranks, right=True)


class Draw:
    """Random numbers for `count` sequences of `length` tokens from `vocabulary` ids."""

    def __init__(self, count: int, length: int, vocabulary: int, generator: torch.Generator) -> None:
        self.count, self.length, self.vocabulary, self.generator = count, length, vocabulary, generator

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers `[B, *shape]` from `low` up to, but not including, `high`."""
        return torch.randint(low, high, (self.count, *shape), generator=self.generator)

    def distinct(self, low: int, high: int, number: int) -> Tensor:
        """Different integers `[B, number]`, in random order."""
        chosen = torch.empty(self.count, 0, dtype=torch.int64)
        for i in range(number):
            chosen = torch.cat([chosen, skip(self.integers(low, high - i, 1), chosen)], 1)
        return chosen

    def choose(self, allowed: Tensor) -> Tensor:
        """The index `[B]` of one of the allowed places of each row, all equally likely."""
        return torch.rand(allowed.shape, generator=self.generator).masked_fill_(~allowed, -1).argmax(1)

    def put(self, tokens: Tensor, start: Tensor, *pattern: Tensor | int) -> None:
        """Write a pattern into every row from `start` `[B]` on."""
        rows = torch.arange(self.count)
        for offset, token in enumerate(pattern):
            tokens[rows, start + offset] = torch.as_tensor(token)


def pick(values: Tensor, index: Tensor) -> Tensor:
    """The value at `index` `[B]` of each row."""
    return values.gather(1, index[:, None]).squeeze(1)


def skip(numbers: Tensor, taken: Tensor) -> Tensor:
    """Map numbers `[B, …]` in order onto those that are not taken `[B, n]`."""
    for one in taken.sort(1).values.T:
        numbers = numbers + (numbers >= one[:, None])
    return numbers
