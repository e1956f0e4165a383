"""Small synthetic tasks for tests: tokens, several tokens at a position, and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prism.lab.tasks.task import IGNORE, Batch, Task


@dataclass(frozen=True)
class Copy(Task):
    """The answer at random places is the token there; the first place is always asked."""

    name: ClassVar[str] = "copy"

    length: int = 8
    vocabulary: int = 6

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(self.vocabulary, (count, self.length), generator=generator)
        asked = torch.rand(count, self.length, generator=generator) < 0.4
        asked[:, 0] = True
        return Batch(tokens, torch.where(asked, tokens, IGNORE))

    def tests(self) -> dict[str, Task]:
        return {"length=8": self, "length=12": Copy(12, self.vocabulary)}

    def baseline(self) -> float:
        return 1 / self.vocabulary


@dataclass(frozen=True)
class Places(Task):
    """Two tokens at every position; the last position asks for 3 · first + second."""

    name: ClassVar[str] = "places"

    @property
    def vocabulary(self) -> int:
        return 3

    @property
    def answers(self) -> int:
        return 9

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(3, (count, 4, 2), generator=generator)
        answers = torch.full((count, 4), IGNORE)
        answers[:, -1] = 3 * tokens[:, -1, 0] + tokens[:, -1, 1]
        return Batch(tokens, answers)

    def baseline(self) -> float:
        return 1 / 9


@dataclass(frozen=True)
class Negate(Task):
    """Numbers: the last position asks for minus its two inputs. The score is minus the mean squared error."""

    name: ClassVar[str] = "negate"
    metric: ClassVar[str] = "negative error"

    @property
    def vocabulary(self) -> int:
        return 2

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(count, 3, 2, generator=generator)
        targets = torch.full_like(inputs, torch.nan)
        targets[:, -1] = -inputs[:, -1]
        return Batch(inputs, targets)

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return -(predictions[:, -1] - targets[:, -1]).square().mean(1)

    def ceiling(self) -> float:
        return 0.0

    def baseline(self) -> float:
        return -1.0
