"""Associative recall at several sizes at once, as Based trains and tests it (Arora et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from prism.lab.tasks.mqar import Recall
from prism.lab.tasks.task import IGNORE, Batch, Task


@dataclass(frozen=True)
class RecallMix(Task):
    """Sequences of several sizes in one batch, zeros after the shorter ones. The defaults are those of Based, figure 2.

    Every sequence counts equally in a score. The baseline answers with any value that the sequence shows.
    """

    name: ClassVar[str] = "mqar_mix"

    sizes: tuple[tuple[int, int], ...] = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))
    """Length and number of pairs of the sequences to train with."""
    weights: tuple[float, ...] = (5, 1, 1, 1, 1)
    """How often each size is drawn, up to a common factor."""
    test_sizes: tuple[tuple[int, int], ...] = (
        (64, 4),
        (64, 8),
        (64, 16),
        (128, 32),
        (256, 64),
        (512, 128),
        (1024, 256),
    )
    """Length and number of pairs of the sequences to test with."""
    vocabulary: int = 8192
    filler: str = "random"
    """As for `Recall`."""

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.weights):
            raise ValueError(
                f"weights must be one per size, of which there are {len(self.sizes)}, got {len(self.weights)}"
            )
        if min(self.weights) <= 0:
            raise ValueError(f"weights must be > 0, got {self.weights}")
        for size in self.sizes + self.test_sizes:
            self._part(size)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw tokens `[B, N]` and answers `[B, N]`, N the largest length."""
        device = generator.device
        chance = torch.tensor(self.weights, dtype=torch.float32, device=device)
        which = torch.multinomial(chance, count, replacement=True, generator=generator)
        longest = max(length for length, _ in self.sizes)
        tokens = torch.zeros(count, longest, dtype=torch.long, device=device)
        answers = torch.full_like(tokens, IGNORE)
        for i, size in enumerate(self.sizes):
            rows = (which == i).nonzero().squeeze(1)
            part = self._part(size).sample(len(rows), generator)
            tokens[rows, : size[0]], answers[rows, : size[0]] = part
        return Batch(tokens, answers)

    def tests(self) -> dict[str, Task]:
        parts = {f"length={length}, pairs={pairs}": self._part((length, pairs)) for length, pairs in self.test_sizes}
        return {"mixture": self, **parts}

    def baseline(self) -> float:
        chances = (w / pairs for w, (_, pairs) in zip(self.weights, self.sizes, strict=True))
        return sum(chances) / sum(self.weights)

    def _part(self, size: tuple[int, int]) -> Recall:
        length, pairs = size
        return Recall(pairs, length, self.vocabulary, self.filler)
