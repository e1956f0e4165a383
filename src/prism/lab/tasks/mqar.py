"""The recall probe: multi-query associative recall (Arora et al., Zoology 2023).

A sequence shows n key-value pairs, then asks for each key once, in random order and at random gaps:

    k₁ v₁ k₂ v₂ … kₙ vₙ  0 0 k₂ 0 k₁ 0 0 0 kₙ …          at each asked key the answer is its value

Keys and values come from disjoint halves of the vocabulary, each without replacement. Gaps follow the published power law
(near questions are likelier). Unused places hold 0; or with `filler="noise"` tokens that are *not* live in this sequence;
or with `filler="random"` any token, as published. Then a live key may come again, followed by anything. The pair that came
first is still the true one, so the ceiling stays 1, but a memory in which the latest pair wins errs: with 256 tokens often,
with 8192 hardly ever.

With a convolution in front of the mixer one layer is enough, and finds the solution in hundreds of steps where two layers
without one need thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from prism.lab.tasks.draws import distinct, others
from prism.lab.tasks.task import IGNORE, Batch, Task

FILLERS = ("zeros", "noise", "random")


@dataclass(frozen=True)
class Recall(Task):
    """One setting of the task. The baseline answers with any value that the sequence shows: 1 / pairs."""

    name: ClassVar[str] = "mqar"

    pairs: int = 16
    """Key-value pairs in a sequence."""
    length: int = 64
    """Tokens in a sequence; at least 4 · pairs."""
    vocabulary: int = 128
    """Size of the vocabulary; keys are 1 … V/2 - 1, values V/2 … V - 1."""
    filler: str = "zeros"
    """`zeros`, `noise` (tokens that are not live in the sequence) or `random` (any token)."""
    power: float = 0.01
    """Gaps g are drawn with probability ∝ (g + 1)^(power - 1)."""
    test_pairs: tuple[int, ...] = ()
    """More numbers of pairs to test with; the sequences get longer where they must."""

    def __post_init__(self) -> None:
        half = self.vocabulary // 2
        if self.pairs < 1:
            raise ValueError(f"pairs must be ≥ 1, got {self.pairs}")
        if self.length < 4 * self.pairs or self.length % 2:
            raise ValueError(f"length must be even and ≥ 4 · pairs = {4 * self.pairs}, got {self.length}")
        if half - 1 < self.pairs:
            raise ValueError(f"vocabulary must be ≥ {2 * self.pairs + 2} for {self.pairs} pairs, got {self.vocabulary}")
        if self.filler not in FILLERS:
            raise ValueError(f"filler must be one of {', '.join(FILLERS)}, got {self.filler!r}")
        for pairs in self.test_pairs:
            _with_pairs(self, pairs)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw tokens `[B, N]` and answers `[B, N]` (IGNORE where nothing is asked)."""
        n, half, device = self.pairs, self.vocabulary // 2, generator.device
        keys = distinct(count, n, half - 1, generator) + 1
        values = distinct(count, n, self.vocabulary - half, generator) + half
        if self.filler == "zeros":
            tokens = torch.zeros(count, self.length, dtype=torch.long, device=device)
        elif self.filler == "noise":
            live = torch.cat([torch.zeros_like(keys[:, :1]), keys, values], 1)
            tokens = others(live, self.length, self.vocabulary, generator)
        else:
            tokens = torch.randint(self.vocabulary, (count, self.length), generator=generator, device=device)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
        slots = (self.length - 2 * n) // 2
        chance = (torch.arange(slots, device=device) + 1.0).pow(self.power - 1).expand(count, slots)
        asked = 2 * n + 2 * torch.multinomial(chance, n, replacement=False, generator=generator)
        order = torch.rand(count, n, generator=generator, device=device).argsort(1)
        tokens.scatter_(1, asked, keys.gather(1, order))
        answers = torch.full_like(tokens, IGNORE).scatter_(1, asked, values.gather(1, order))
        return Batch(tokens, answers)

    def tests(self) -> dict[str, Task]:
        pairs = dict.fromkeys((self.pairs, *self.test_pairs))
        return {f"pairs={n}": _with_pairs(self, n) for n in pairs}

    def baseline(self) -> float:
        return 1 / self.pairs


def _with_pairs(task: Recall, pairs: int) -> Recall:
    return replace(task, pairs=pairs, length=max(task.length, 4 * pairs), test_pairs=())


def fewer_pairs(pairs: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of a number of pairs, to test a model with that was trained on that number."""
    return tuple(sorted({max(1, pairs * quarters // 4) for quarters in (1, 2, 3)} - {pairs}))


PRESETS = {
    "easy": Recall(8, 32, test_pairs=fewer_pairs(8)),
    "starved": Recall(16, 64, test_pairs=fewer_pairs(16)),
    "zoology-64": Recall(4, 64, 8192, test_pairs=fewer_pairs(4)),
    "zoology-128": Recall(8, 128, 8192, test_pairs=fewer_pairs(8)),
    "zoology-256": Recall(16, 256, 8192, test_pairs=fewer_pairs(16)),
    "zoology-512": Recall(64, 512, 8192, test_pairs=fewer_pairs(64)),
}
"""Small settings that train in a minute on one core, and those of Zoology's figure 2, which need a GPU."""
