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
