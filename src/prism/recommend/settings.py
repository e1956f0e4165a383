"""Settings and presets of `prism train rec`. The text under a field is its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prism.messages import did_you_mean
from prism.overrides import override
from prism.recommend.config import HSTU, SASREC
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
    """Sizes of the model, and what it reads of an event."""

    hidden_size: int = 64
    """Width of the model and of the item embeddings."""
    num_hidden_layers: int = 2
    """Number of layers."""
    head_dim: int | None = None
    """Width of a head's keys and values, for rules with that option (64 and 128 suit the kernels). None: the rule's default."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers. 0: none. None: 8/3 of hidden_size, rounded up to a multiple of 64."""
    dropout: float = 0.2
    """Dropout rate on the input and on every residual branch."""
    id_dropout: float = 0.0
    """Probability that an item has only its features in a training step, and no embedding as itself. About 0.1 lets new
    items, which have no embedding, be scored by their features."""
    time_gaps: bool = False
    """Give the model the time since the previous event; the events must have times."""
    embedding_scale: float = 1.0
    """Factor on the item embeddings at the input; SASRec uses the square root of the width."""
    initializer_range: float = 0.02
    """Standard deviation of the initial embeddings and linear maps."""


@dataclass(frozen=True)
class LossSettings:
    """What the scores of the next item are compared with."""

    name: Literal["full_softmax", "sampled_softmax", "bce", "gbce"] = "full_softmax"
    """full_softmax compares with all items.
    With sampled negatives: sampled_softmax, bce (binary cross-entropy), or gbce (gSASRec's calibrated bce)."""
    negatives: Literal["uniform", "popularity", "in_batch"] = "uniform"
    """How negatives are sampled: uniform over all items, by popularity, or from the other targets of the batch."""
    count: int = field(default=256, metadata={"min": 1})
    """Number of negatives."""
    own: bool = False
    """Sample negatives per target instead of sharing one set per step."""
    logq: bool = True
    """Apply the logQ correction in sampled softmax."""
    t: float = 0.75
    """gbce: calibration from 0 (plain bce) to 1 (scores are calibrated as if all items were negatives)."""


@dataclass(frozen=True)
class RecValidationSettings(ValidationSettings):
    """When held-out events are ranked, and what chooses the best model."""

    every: int = field(default=0, metadata={"min": 0})
    """Steps between validations. 0: use validation.epochs."""
    epochs: float = field(default=1.0, metadata={"min": 0})
    """Epochs between validations. 0: only after the last step."""
    sequences: int = field(default=0, metadata={"min": 0})
    """Number of held-out events to predict, spread evenly. 0: all."""
    metric: str = "NDCG@10"
    """Metric that chooses the best model, on a ranking of all items.
    HR, NDCG or MRR at 1, 5, 10, 20, 50, 100, 200 or 500 (such as NDCG@10), or AUC."""
    filter_seen: bool = True
    """Leave out items that the user already had."""


@dataclass(frozen=True)
class RecSettings(RunSettings):
    """Train a recommender on user events, or resume a run.

    Settings come from the preset (in an existing run folder: from its own settings), then the TOML file, then the flags;
    later ones override earlier ones.
    """

    preset: str | None = None
    """Model preset: prism, sasrec or hstu. None: prism."""
    out: Path = Path("runs/rec")
    """Run folder: checkpoints, log, settings and, at the end, the model."""
    steps: int = field(default=0, metadata={"min": 0})
    """Number of optimizer steps. 0: as many as `epochs` need."""
    epochs: float = field(default=20.0, metadata={"min": 0})
    """Number of passes over the samples; ignored if `steps` is given."""
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
    update: Path | None = None
    """Run or saved recommender to continue with the events of data.source: new users and items are added, and its settings
    are the defaults. None: a new model."""
    replay: float = field(default=1.0, metadata={"min": 0})
    """update: old samples to repeat for each new one, so that what was learned from them is not lost."""
    report: bool = True
    """After training, rank the test events once and write a report to the run folder."""

    def check(self) -> None:
        super().check()
        if not self.steps and not self.epochs:
            raise ValueError("steps and epochs are both 0: set one of them")
        if not 0 <= self.loss.t <= 1:
            raise ValueError(f"loss.t must be between 0 and 1, got {self.loss.t}")

    def for_samples(self, samples: int) -> RecSettings:
        """Settings with epochs converted to steps, for this number of samples."""
        epoch_steps = samples / self.batch.sequences
        every = self.validation.every or max(1, round(self.validation.epochs * epoch_steps))
        if not self.validation.every and not self.validation.epochs:
            every = 0
        return replace(
            self,
            steps=self.steps or max(1, round(self.epochs * epoch_steps)),
            validation=replace(self.validation, every=every),
        )


PRESETS: dict[str, dict[str, Any]] = {"prism": {}, "sasrec": SASREC, "hstu": HSTU}
"""Changes of each preset in the section `model`; sasrec and hstu are the published baselines."""


def preset(name: str | None) -> RecSettings:
    """Settings of a preset. None: prism."""
    name = name or "prism"
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}: choose from {', '.join(PRESETS)}")
    return override(RecSettings(preset=name), {"model": PRESETS[name]}, f"preset {name}")
