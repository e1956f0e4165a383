"""Group words: the running product of random group elements (Liu et al. 2023; Merrill et al. 2024; DeltaProduct 2025).

    BOS g₁ g₂ g₃ …          at gᵢ the answer is g₁ · g₂ · … · gᵢ

A memory must hold one of |G| states and move it by any element. Z2 is parity; Z3 needs a rotation; S3 two reflections a
token; S4 and A5 are rotations of space. A5 and S5 are not solvable: no circuit of constant depth is known to compute their
words, so a model that works on all tokens at once needs more layers for longer words.

Design choices
- Elements are permutations in lexicographic order, the identity first; a · b applies b first. BOS is the last token.
- A sequence counts only when every answer is right: the published measure, far harsher than the share of right answers.
  `curve` shows how far into the sequences a model stays right.
- Tests are one, two and four times as long as training: a model that memorised the lengths fails there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from prism.lab.tasks.task import IGNORE, Batch, Task

GROUPS = ("Z2", "Z3", "S3", "S4", "A5", "S5")


@dataclass(frozen=True)
class GroupWords(Task):
    """Running products in a finite group."""

    name: ClassVar[str] = "group"
    metric: ClassVar[str] = "sequence accuracy"

    group: str = "S3"
    """Z2, Z3 (cyclic), S3, S4, S5 (all permutations) or A5 (the even ones)."""
    length: int = 128
    """Elements in a training sequence."""
    test_lengths: tuple[int, ...] = ()
    """Elements in a test sequence, the main test first. Empty: four, two and one times `length`."""

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group must be one of {', '.join(GROUPS)}, got {self.group!r}")
        for what, length in [("length", self.length), *(("test_lengths", length) for length in self.test_lengths)]:
            if length < 1:
                raise ValueError(f"{what} must be ≥ 1, got {length}")

    @property
    def vocabulary(self) -> int:
        return self.answers + 1

    @property
    def answers(self) -> int:
        return len(elements(self.group))

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        with torch.device("cpu"):  # a table is kept for other generators, whatever device is the default now
            table = product_table(self.group).flatten()
        table = table.to(generator.device)
        words = torch.randint(self.answers, (self.length, count), generator=generator)
        inputs = torch.full((count, self.length + 1), self.answers)
        targets = torch.full_like(inputs, IGNORE)
        inputs[:, 1:] = words.T
        products = [words[0]]
        for element in words[1:]:
            products.append(table[products[-1] * self.answers + element])
        targets[:, 1:] = torch.stack(products, 1)
        return Batch(inputs, targets)

    def tests(self) -> dict[str, Task]:
        lengths = self.test_lengths or (4 * self.length, 2 * self.length, self.length)
        return {str(length): replace(self, length=length) for length in lengths}

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """1 for every sequence with all answers right, else 0 `[B]`."""
        return ((predictions == targets) | (targets == IGNORE)).all(1).to(torch.get_default_dtype())

    def curve(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The share of sequences whose first i answers are all right, for i = 1 … T `[T]` (BOS is not counted)."""
        return (predictions[:, 1:] == targets[:, 1:]).long().cumprod(1).double().mean(0)

    def baseline(self) -> float:
        return float(self.answers) ** -self.length


@cache
def elements(group: str) -> Tensor:
    """The elements of a group as permutations `[|G|, n]`, in lexicographic order."""
    kind, degree = group[0], int(group[1:])
    if kind == "Z":
        return (torch.arange(degree)[:, None] + torch.arange(degree)) % degree
    every = torch.tensor(list(itertools.permutations(range(degree))))
    if kind == "S":
        return every
    first, second = torch.triu_indices(degree, degree, 1)
    odd = (every[:, first] > every[:, second]).sum(1) % 2
    return every[odd == 0]


@cache
def product_table(group: str) -> Tensor:
    """The index of a · b for all pairs of elements `[|G|, |G|]`."""
    permutations = elements(group)
    degree = permutations.shape[1]
    weights = degree ** torch.arange(degree - 1, -1, -1)
    codes = permutations @ weights  # ascending, because the order is lexicographic
    products = permutations[:, permutations]  # [a, b, x] = a(b(x))
    return torch.searchsorted(codes, products @ weights)
