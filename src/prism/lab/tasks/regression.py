"""Noisy linear regression in context: infer a linear map from examples and apply it to new inputs.

Every sequence has a linear map W `[E, D]` of its own, with normal entries of variance 1/D. Its first tokens hold an example
each, x and y = W x + σ ε side by side; its last tokens hold an x, zeros and a 1 that marks the question:

    (x₁ y₁ 0) (x₂ y₂ 0) … (xₙ yₙ 0)  (x 0 1) (x' 0 1) …          at each question the answer is W x, without the noise

Storing is not enough: the noise must be averaged, and inputs that are not orthogonal must be separated. The best answer
is ridge regression with the penalty D σ², the posterior mean. All x have the length √D, any direction is equally likely:
rules that normalise their keys lose nothing by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from prism.lab.tasks.task import Batch, Task

_CEILING_SEQUENCES = 4096


@dataclass(frozen=True)
class Regression(Task):
    """One setting of the task. A sequence scores 1 - (mean squared error) / (variance of the answers, which is 1).

    The variance is that of the task, not of the sequence, so that the mean over sequences is the explained variance. The
    baseline answers 0 and scores 0; worse answers score less.
    """

    name: ClassVar[str] = "regression"
    metric: ClassVar[str] = "explained variance"

    features: int = 8
    """Width D of x."""
    outputs: int = 4
    """Width E of y."""
    examples: int = 32
    """Examples in a sequence."""
    questions: int = 8
    """Questions at its end."""
    noise: float = 0.5
    """Standard deviation σ of the noise in y; that of W x is 1."""
    test_examples: tuple[int, ...] = ()
    """More numbers of examples to test with. Empty: a quarter, half and twice as many."""

    def __post_init__(self) -> None:
        for name in ("features", "outputs", "examples", "questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be ≥ 1, got {getattr(self, name)}")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be a number ≥ 0, got {self.noise}")
        for examples in self.test_examples:
            self._with_examples(examples)

    @property
    def vocabulary(self) -> int:
        return self.features + self.outputs + 1

    @property
    def answers(self) -> int:
        return self.outputs

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.examples + self.questions

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw numbers `[B, T, D + E + 1]` and answers `[B, T, E]`."""
        n, features, outputs = self.examples, self.features, self.outputs

        def normal(*shape: int) -> Tensor:
            return torch.randn(count, *shape, generator=generator, device=generator.device)

        maps = normal(features, outputs) * features**-0.5
        x = _scale(normal(self.length, features))
        y = x @ maps
        inputs = torch.cat([x, y, torch.zeros_like(y[..., :1])], 2)
        inputs[:, :n, features:-1] += self.noise * normal(n, outputs)
        inputs[:, n:, features:-1], inputs[:, n:, -1] = 0.0, 1.0
        targets = y.clone()
        targets[:, :n] = math.nan
        return Batch(inputs, targets)

    def tests(self) -> dict[str, Task]:
        usual = [n for n in (self.examples // 4, self.examples // 2, 2 * self.examples) if n]
        numbers = dict.fromkeys((self.examples, *(self.test_examples or usual)))
        return {f"examples={n}": self._with_examples(n) for n in numbers}

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        asked = ~targets.isnan()
        errors = torch.where(asked, predictions - targets, 0.0).square()
        return 1 - errors.flatten(1).sum(1) / asked.flatten(1).sum(1)

    def ceiling(self) -> float:
        return _ceiling(self.features, self.examples, self.noise)

    def baseline(self) -> float:
        return 0.0

    def _with_examples(self, examples: int) -> Regression:
        return replace(self, examples=examples, test_examples=())


@lru_cache(maxsize=256)
def _ceiling(features: int, examples: int, noise: float) -> float:
    """Explained variance of the posterior mean: 1 - E tr (D I + XᵀX / σ²)⁻¹, the mean over many draws of X.

    Its standard error is below .001 except for a handful of features. Without noise the n examples fix W on n of the D
    directions and say nothing of the others.
    """
    if noise == 0:
        return min(1.0, examples / features)
    generator = torch.Generator().manual_seed(0)
    x = _scale(torch.randn(_CEILING_SEQUENCES, examples, features, generator=generator, dtype=torch.float64))
    eigenvalues = torch.linalg.eigvalsh(x.mT @ x)
    return 1 - (1 / (features + eigenvalues.clamp(min=0) / noise**2)).sum(1).mean().item()


def _scale(x: Tensor) -> Tensor:
    """Vectors `[…, D]` of the same directions with the length √D."""
    return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True))
