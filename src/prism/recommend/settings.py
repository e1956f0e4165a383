"""Every choice of a recommender's training, with its meaning. The text under a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prism.messages import did_you_mean
from prism.models.config import HSTU, SASREC
from prism.overrides import override
from prism.recommend.events.recipe import RecDataSettings
from prism.train.settings import (
    BatchSettings,
    CheckpointSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    StackSettings,
    ValidationSettings,
)


@dataclass(frozen=True)
class RecModelSettings(StackSettings):
    hidden_size: int = 64
    """Width of the model, and length of an item's vector."""
    num_hidden_layers: int = 2
    """Number of layers."""
    head_dim: int | None = None
    """Size of a head's keys and values, for rules that let it be chosen (kernels like 64 and 128); None: the rule's own."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; 0: none; None: 8/3 of the model's, up to the next multiple of 64."""
    dropout: float = 0.2
    """Share of numbers dropped in training from the input and from what every layer adds."""
    time_gaps: bool = False
    """Tell the model how long after the one before it an event came; the log must have times."""
    embedding_scale: float = 1.0
    """What items' vectors are multiplied by on the way in; SASRec has the root of the width."""
    initializer_range: float = 0.02
    """Standard deviation of embeddings and linear maps at the start."""


@dataclass(frozen=True)
class LossSettings:
    name: Literal["full_softmax", "sampled_softmax", "bce", "gbce"] = "full_softmax"
    """Against all items, or against some: sampled softmax, binary cross-entropy, or gSASRec's calibrated one."""
    negatives: Literal["uniform", "popularity", "in_batch"] = "uniform"
    """Where those some come from: all items alike, by how often they occur, or other targets of the batch."""
    count: int = field(default=256, metadata={"min": 1})
    """How many of them."""
    own: bool = False
    """Each target has its own, instead of the same for all of a step."""
    logq: bool = True
    """Sampled softmax counts each for the items it stands for."""
    t: float = 0.75
    """gbce: 0 is bce, 1 makes scores the probabilities that a look at all items would have given."""


@dataclass(frozen=True)
class RecValidationSettings(ValidationSettings):
    every: int = field(default=0, metadata={"min": 0})
    """Steps between validations; 0: as `epochs` says."""
    epochs: float = field(default=1.0, metadata={"min": 0})
    """Epochs between validations; 0: only after the last step."""
    sequences: int = field(default=0, metadata={"min": 0})
    """Held-out events that are predicted, spread evenly over all; 0: all."""
    metric: str = "NDCG@10"
    """What the best model is best at, on a ranking of all items: HR, NDCG or MRR at 1, 5, 10, 20, 50, 100, 200 or 500; AUC."""
    filter_seen: bool = True
    """Items that a user has had already are not ranked."""


@dataclass(frozen=True)
class RecSettings(RunSettings):
    """Train a recommender on a log of events.

    Later beats earlier: the preset (or, in a run folder that exists, the settings it was started with), the TOML file,
    the flags.
    """

    preset: str | None = None
    """The model to start from: prism, sasrec or hstu. None: prism."""
    out: Path = Path("runs/rec")
    """The run folder: checkpoints, log, settings and, at the end, the model."""
    steps: int = field(default=0, metadata={"min": 0})
    """Optimiser steps in all; 0: as many as `epochs` take."""
    epochs: float = field(default=20.0, metadata={"min": 0})
    """How often every sample is seen, unless `steps` says otherwise."""
    batch: BatchSettings = field(default_factory=lambda: BatchSettings(128))
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    )
    schedule: ScheduleSettings = field(default_factory=lambda: ScheduleSettings(warmup=20))
    validation: RecValidationSettings = field(default_factory=lambda: RecValidationSettings(patience=5))
    checkpoint: CheckpointSettings = field(default_factory=lambda: CheckpointSettings(every=1000))
    model: RecModelSettings = field(default_factory=RecModelSettings)
    data: RecDataSettings = field(default_factory=RecDataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    report: bool = True
    """When training has ended, the command ranks the test events once and writes a report beside the model."""

    def check(self) -> None:
        super().check()
        if not self.steps and not self.epochs:
            raise ValueError("steps and epochs are both 0: say how long to train")
        if not 0 <= self.loss.t <= 1:
            raise ValueError(f"loss.t must be between 0 and 1, got {self.loss.t}")

    def for_samples(self, samples: int) -> RecSettings:
        """With epochs turned into steps, for this many samples."""
        an_epoch = samples / self.batch.sequences
        every = self.validation.every or max(1, round(self.validation.epochs * an_epoch))
        if not self.validation.every and not self.validation.epochs:
            every = 0
        return replace(
            self,
            steps=self.steps or max(1, round(self.epochs * an_epoch)),
            validation=replace(self.validation, every=every),
        )


# Presets of `prism train rec`: the published models that others are compared with, as settings.

PRESETS: dict[str, dict[str, Any]] = {"prism": {}, "sasrec": SASREC, "hstu": HSTU}
"""What each changes in the section `model`."""


def preset(name: str | None) -> RecSettings:
    """Settings of a preset; None is "prism"."""
    name = name or "prism"
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}: choose from {', '.join(PRESETS)}")
    return override(RecSettings(preset=name), {"model": PRESETS[name]}, f"preset {name}")
