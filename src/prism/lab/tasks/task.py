"""What a synthetic task is: sequences with answers, whose samples never fall into more than one split.

A task is a frozen dataclass whose fields are its settings. It draws sequences (`sample`), names the settings to test with
(`tests`), judges answers (`score`), and states what an oracle and the majority answer would reach.

No sample is in two splits: a hash of a sample's inputs decides which split it belongs to, and a split draws until it has
enough samples of its own. So neither equal seeds nor a small number of possible sequences can make them overlap.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

IGNORE = -100
"""The target where nothing is asked."""
SHARES = {"train": (0, 2), "validation": (2, 3), "test": (3, 4)}
"""The remainders modulo 4 of a sample's hash that belong to a split: half of all sequences, a quarter, a quarter."""


class Batch(NamedTuple):
    """Sequences and their answers."""

    inputs: Tensor
    """Tokens `[B, T]`; tokens `[B, T, S]`, S at each position (one embedding per place, summed); or numbers `[B, T, D]`."""
    targets: Tensor
    """Answers `[B, T]`, IGNORE where nothing is asked; or numbers `[B, T, E]`, NaN where nothing is asked."""


@dataclass(frozen=True)
class Task(ABC):
    """A synthetic task. The fields of a subclass are its settings; `__post_init__` refuses those that make no sense."""

    name: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    """What `score` is, for tables and axes."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of input tokens. Tasks over numbers: the width D of the inputs."""

    @property
    def answers(self) -> int:
        """Number of possible answers. Tasks over numbers: the width E of the targets."""
        return self.vocabulary

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw `count` sequences of any split, on the generator's device."""

    def content(self, inputs: Tensor) -> Tensor:
        """Inputs as the hash that decides on their split reads them: padding must be 0."""
        return inputs

    def tests(self) -> dict[str, Task]:
        """The tasks to test a trained model with, by label; the first is the main one. Same vocabulary and answers."""
        return {"": self}

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Score of every sequence `[B]`, higher is better: by default the share of right answers.

        Args:
            predictions: likeliest answers `[B, T]`, or numbers `[B, T, E]`; arbitrary where nothing is asked.
        """
        asked = targets != IGNORE
        return ((predictions == targets) & asked).sum(1) / asked.sum(1)

    def ceiling(self) -> float:
        """Expected score of an oracle that knows the generator and sees the inputs only."""
        return 1.0

    @abstractmethod
    def baseline(self) -> float:
        """Expected score of the best answer that ignores the inputs (or of the rule that the task's docstring names)."""


def draw(task: Task, count: int, split: str, generator: torch.Generator) -> Batch:
    """Draw `count` sequences that belong to a split."""
    low, high = SHARES[split]
    found: list[Batch] = []
    missing, drawn = count, 0
    while missing > 0:
        share = 4 // (high - low)
        with generator.device:  # what a task makes without naming a device is made there
            batch = task.sample(max(16, share * missing * 9 // 8), generator)
        drawn += len(batch.inputs)
        remainder = hash_rows(task.content(batch.inputs)) % 4
        chosen = ((remainder >= low) & (remainder < high)).nonzero().squeeze(1)[:missing]
        found.append(Batch(batch.inputs[chosen], batch.targets[chosen]))
        missing -= len(chosen)
        if missing == count and drawn > 1000 * count + 10_000:
            raise ValueError(
                f"task {task.name!r} has too few different sequences for the split {split!r}: make them longer"
            )
    return Batch(torch.cat([b.inputs for b in found]), torch.cat([b.targets for b in found]))


def stream(split: str, seed: int, name: str = "", device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for every split, seed and name. Its device is where the samples are drawn."""
    digest = hashlib.sha256(f"{split} {seed} {name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def hash_rows(inputs: Tensor) -> Tensor:
    """A hash ≥ 0 of every row `[B]`, of all its values and their places; zeros do not count.

    So a sequence and the same sequence with zeros after it belong to the same split.
    """
    rows = inputs.flatten(1)
    if rows.is_floating_point():
        rows = (rows.float() + 0.0).view(torch.int32).long()  # -0 is 0
    places = torch.arange(1, rows.shape[1] + 1, dtype=torch.int64, device=rows.device)
    mixed = rows * (2 * places * 0x5851F42D4C957F2D + 1)  # wraps; odd factors, one per place
    mixed ^= mixed >> 29
    mixed *= 0x2545F4914F6CDD1D
    mixed ^= mixed >> 32
    total = mixed.sum(1)
    for factor in (0x1B873593CC9E2D51, 0x369DEA0F31A53F85):
        total = (total ^ (total >> 32)) * factor
    return (total ^ (total >> 32)) & 0x7FFFFFFFFFFFFFFF
