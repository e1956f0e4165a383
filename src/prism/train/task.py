"""The interface between the training loop and its tasks, such as a language model or a recommender."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from prism.engine.sequence_parallel import Context
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.settings import RunSettings


class Samples(Protocol):
    """The samples of one step: they can be sliced by row, moved to a device and saved."""

    def __getitem__(self, rows: slice) -> Samples: ...

    def to(self, device: torch.device) -> Samples: ...

    def tensors(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class ValidationResult:
    """The result of one validation."""

    score: Any
    """The task's own score object."""
    quality: float
    """One number for early stopping: higher is better."""
    record: dict[str, float]
    """Metrics for the log."""
    text: str
    """One line for the terminal."""


class Task(Protocol):
    """What is trained, on which data, and how it is exported.

    Every process has its own instance, and all agree: samples and weights are functions of their number alone.
    """

    @property
    def name(self) -> str:
        """The task's name as in `prism train lm`, stored in the run folder."""

    @property
    def unit(self) -> str:
        """What the loss is a mean over, in the plural, such as tokens."""

    @property
    def settings(self) -> RunSettings:
        """The settings of the run."""

    def build(self) -> nn.Module:
        """A new model; its weights may be on the meta device."""

    def initialize(self, model: nn.Module) -> None:
        """Set the model's initial weights, the same on every device and sharding."""

    def identity(self) -> dict[str, Any]:
        """What decides the shapes of weights and the order of samples. A resumed run must match it; all else may change."""

    def config(self) -> dict[str, Any]:
        """Further entries of config.json: the settings as given, and facts about the data."""

    def files(self) -> dict[str, bytes]:
        """Further files of the run folder, by name."""

    def share_sequences(self, context: Context) -> None:
        """Let several processes share every sequence: from now on `samples` returns this process's part of them.

        Raises ValueError if the task, a rule of its model or the length of its sequences does not allow it.
        """

    def samples(self, numbers: np.ndarray, device: torch.device) -> Samples:
        """Samples i, j, … of the infinite training order."""

    def weight(self, numbers: np.ndarray) -> int:
        """Number of units in these samples: a step's loss is their summed loss divided by this."""

    def seen(self, step: int) -> dict[str, float]:
        """Amount of data used up to this step, for the log."""

    def loss(self, model: nn.Module, samples: Any) -> Tensor:
        """The loss summed over the samples' units, a float32 scalar."""

    def validate(self, model: nn.Module, world: World, at_once: int) -> ValidationResult:
        """Validate, on all processes together, with at most `at_once` samples per forward pass."""

    def write_model(self, run: Path, checkpoint: Checkpoint, folder: Path) -> None:
        """Write the model of a checkpoint into an empty folder."""


@runtime_checkable
class ShowsSamples(Protocol):
    """A task that shows now and then what its model does, without changing what is trained."""

    @property
    def sample_every(self) -> int:
        """Steps between samples; 0: none."""

    def sample(self, model: nn.Module) -> str:
        """A sample of the model in its current state, for the terminal and the log. Called on all processes."""
