"""Recall of several pairs from one token: the memory must write m associations at once.

One token of the sequence holds m key-value pairs, in S = 2m places (the model adds up one embedding per place). After n
such events, tokens with one key each ask for all keys in random order. Places that are not used hold 0. With m = 2:

    (k₁ v₁ k₂ v₂) (k₃ v₃ k₄ v₄) …  (k₃ 0 0 0) (k₁ 0 0 0) …         at each asked key the answer is its value

A rule that writes rank 1 a token must blend the pairs of an event, or carry them to later tokens; a rule that writes rank
m need not. Keys and values come from disjoint halves of the vocabulary, each without replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from prism.lab.tasks.draws import distinct
from prism.lab.tasks.task import IGNORE, Batch, Task


@dataclass(frozen=True)
class MultiPair(Task):
    """One setting of the task. The baseline answers with any value that the sequence shows: 1 / (events · m)."""

    name: ClassVar[str] = "multi_pair"

    events: int = 8
    """Tokens that show pairs."""
    pairs_per_token: int = 2
    """Pairs in one of them, m: the rank of the event."""
    vocabulary: int = 128
    """Size of the vocabulary; keys are 1 … V/2 - 1, values V/2 … V - 1."""
    test_events: tuple[int, ...] = ()
    """More numbers of events to test with. Empty: a quarter, half and twice as many, where they are possible."""

    def __post_init__(self) -> None:
        if self.events < 1:
            raise ValueError(f"events must be ≥ 1, got {self.events}")
        if self.pairs_per_token < 1:
            raise ValueError(f"pairs_per_token must be ≥ 1, got {self.pairs_per_token}")
        if self.vocabulary // 2 - 1 < self.pairs:
            raise ValueError(f"vocabulary must be ≥ {2 * self.pairs + 2} for {self.pairs} pairs, got {self.vocabulary}")
        for events in self.test_events:
            self._with_events(events)

    @property
    def pairs(self) -> int:
        """Pairs in a sequence."""
        return self.events * self.pairs_per_token

    @property
    def length(self) -> int:
        """Tokens in a sequence: the events, then one question a pair."""
        return self.events + self.pairs

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw tokens `[B, T, 2m]` and answers `[B, T]`."""
        n, m, half, device = self.events, self.pairs_per_token, self.vocabulary // 2, generator.device
        keys = distinct(count, n * m, half - 1, generator) + 1
        values = distinct(count, n * m, self.vocabulary - half, generator) + half
        tokens = torch.zeros(count, self.length, 2 * m, dtype=torch.long, device=device)
        tokens[:, :n, 0::2], tokens[:, :n, 1::2] = keys.view(count, n, m), values.view(count, n, m)
        order = torch.rand(count, n * m, generator=generator, device=device).argsort(1)
        tokens[:, n:, 0] = keys.gather(1, order)
        answers = torch.full((count, self.length), IGNORE, dtype=torch.long, device=device)
        answers[:, n:] = values.gather(1, order)
        return Batch(tokens, answers)

    def tests(self) -> dict[str, Task]:
        most = (self.vocabulary // 2 - 1) // self.pairs_per_token
        usual = [n for n in (self.events // 4, self.events // 2, 2 * self.events) if 1 <= n <= most]
        numbers = dict.fromkeys((self.events, *(self.test_events or usual)))
        return {f"events={n}": self._with_events(n) for n in numbers}

    def baseline(self) -> float:
        return 1 / self.pairs

    def _with_events(self, events: int) -> MultiPair:
        return replace(self, events=events, test_events=())
