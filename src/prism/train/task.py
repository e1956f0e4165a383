"""What the loop asks of whatever it trains: a language model on text, a recommender on histories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.settings import RunSettings


class Samples(Protocol):
    """The samples of one step: rows can be cut out of them, and all can be moved and saved."""

    def __getitem__(self, rows: slice) -> Samples: ...

    def to(self, device: torch.device) -> Samples: ...

    def tensors(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Verdict:
    """What a validation found."""

    score: Any
    """In the task's own terms."""
    quality: float
    """One number for "is it the best so far": more is better."""
    record: dict[str, float]
    """For the log."""
    text: str
    """For people."""


class Task(Protocol):
    """What is learned, from what, and what comes of it.

    Every process has one and all say the same: a sample, and a weight, is a function of its number.
    """

    @property
    def name(self) -> str:
        """As in `prism train lm`: which kind of run a folder holds."""

    @property
    def unit(self) -> str:
        """What a loss is the mean over, in the plural."""

    @property
    def settings(self) -> RunSettings:
        """With every number that the loop needs."""

    def build(self) -> nn.Module: ...

    def initialize(self, model: nn.Module) -> None:
        """Give the model its first weights, the same whatever device or sharding it has."""

    def identity(self) -> dict[str, Any]:
        """What decides the weights' shapes and which sample comes when. The rest may change between resumes."""

    def config(self) -> dict[str, Any]:
        """What else config.json says: the settings as they were given, and facts about the data."""

    def files(self) -> dict[str, bytes]:
        """Other files that the run folder holds, by name."""

    def samples(self, numbers: np.ndarray, device: torch.device) -> Samples:
        """Samples i, j, … of the endless training order."""

    def weight(self, numbers: np.ndarray) -> int:
        """How many units these samples have: the loss of a step is a sum over them, divided by this."""

    def seen(self, step: int) -> dict[str, float]:
        """How much was learned from up to this step, for the log."""

    def loss(self, model: nn.Module, samples: Any) -> Tensor:
        """Summed over the samples' units, float32."""

    def validate(self, model: nn.Module, world: World, at_once: int) -> Verdict:
        """All processes take part, with at most `at_once` samples at a time."""

    def write_model(self, run: Path, checkpoint: Checkpoint, folder: Path) -> None:
        """What others open, from a checkpoint: written into an empty folder."""
