"""The recall probe: multi-query associative recall (Arora et al., Zoology 2023).

A sequence shows n key-value pairs, then asks for each key once, in random order and at random gaps:

    k₁ v₁ k₂ v₂ … kₙ vₙ  0 0 k₂ 0 k₁ 0 0 0 kₙ …          at each asked key the answer is its value

Keys and values come from disjoint halves of the vocabulary, each without replacement. Gaps follow the published power law
(near questions are likelier). Unused places hold 0, or with `filler="noise"` tokens that are *not* live in this sequence:
the published generator draws noise from the whole vocabulary, which with a small vocabulary makes answers ambiguous.

With a convolution in front of the mixer one layer is enough, and finds the solution in hundreds of steps where two layers
without one need thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prism.probes.task import IGNORE, Batch, Task


@dataclass(frozen=True)
class Recall(Task):
    """One setting of the task: its sequences and answers."""

    name: ClassVar[str] = "mqar"

    pairs: int = 16
    """Key-value pairs in a sequence."""
    length: int = 64
    """Tokens in a sequence; at least 4 · pairs."""
    vocabulary: int = 128
    """Size of the vocabulary; keys are 1 … V/2 - 1, values V/2 … V - 1."""
    filler: str = "zeros"
    """`zeros` or `noise` (tokens that are not live in the sequence)."""
    power: float = 0.01
    """Gaps g are drawn with probability ∝ (g + 1)^(power - 1)."""

    def __post_init__(self) -> None:
        half = self.vocabulary // 2
        if self.pairs < 1:
            raise ValueError(f"pairs must be ≥ 1, got {self.pairs}")
        if self.length < 4 * self.pairs or self.length % 2:
            raise ValueError(f"length must be even and ≥ 4 · pairs = {4 * self.pairs}, got {self.length}")
        if half - 1 < self.pairs:
            raise ValueError(f"vocabulary must be ≥ {2 * self.pairs + 2} for {self.pairs} pairs, got {self.vocabulary}")
        if self.filler not in ("zeros", "noise"):
            raise ValueError(f"filler must be 'zeros' or 'noise', got {self.filler!r}")

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        """Draw tokens `[B, N]` and answers `[B, N]` (IGNORE where nothing is asked)."""
        n, half = self.pairs, self.vocabulary // 2
        keys = _draw(torch.ones(batch, half - 1), n, generator) + 1
        values = _draw(torch.ones(batch, self.vocabulary - half), n, generator) + half
        tokens = torch.zeros(batch, self.length, dtype=torch.long)
        if self.filler == "noise":
            free = torch.ones(batch, self.vocabulary)
            free[:, 0] = 0
            free.scatter_(1, torch.cat([keys, values], 1), 0.0)
            tokens = torch.multinomial(free, self.length, replacement=True, generator=generator)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
        slots = (self.length - 2 * n) // 2
        chance = (torch.arange(slots) + 1.0).pow(self.power - 1).expand(batch, slots)
        asked = 2 * n + 2 * _draw(chance, n, generator)
        order = torch.rand(batch, n, generator=generator).argsort(1)
        tokens.scatter_(1, asked, keys.gather(1, order))
        answers = torch.full_like(tokens, IGNORE).scatter_(1, asked, values.gather(1, order))
        return Batch(tokens, answers)

    def baseline(self) -> float:
        return 1 / (self.vocabulary - self.vocabulary // 2)


def _draw(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` indices of each row without replacement."""
    return torch.multinomial(weights, count, replacement=False, generator=generator)
