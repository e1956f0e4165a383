"""Random choices for many sequences at once: without loops over the sequences."""

from __future__ import annotations

import torch
from torch import Tensor


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
