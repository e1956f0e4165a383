"""Settings of `prism train sft` and `prism train dpo`. The docstring of a field is its help text on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from prism.language.chat_rows import ChatRecipe
from prism.overrides import command_of, train_command
from prism.train.settings import BatchSettings, OptimizerSettings, RunSettings, ScheduleSettings


@dataclass(frozen=True)
class ChatDataSettings(ChatRecipe):
    cache: Path | None = None
    """Folder for encoded chats. None: $PRISM_CACHE, or prism in the user's cache folder."""
    verify: bool = True
    """Check the encoded chats against their SHA-256 before training."""

    def recipe(self) -> ChatRecipe:
        """The fields that decide which rows come out: caches are keyed by these alone."""
        return ChatRecipe(**{part.name: getattr(self, part.name) for part in fields(ChatRecipe)})


@dataclass(frozen=True)
class SftDataSettings(ChatDataSettings):
    packing: bool = True
    """Put several chats into one row, with a reset of the memories where each starts. Models of transformers cannot reset, so
    they get one chat per row."""


@dataclass(frozen=True)
class LoraSettings:
    rank: int = field(default=0, metadata={"short": True, "min": 0})
    """Train a LoRA adapter of this rank (also: --lora RANK); only the adapter is trained and saved. 0: train all weights."""
    alpha: float | None = None
    """The adapter's output is scaled by alpha / rank. None: 2 · rank."""
    dropout: float = 0.0
    """Dropout of the adapter's inputs in training."""
    targets: tuple[str, ...] = ()
    """Names of the linear maps to adapt, or all-linear. Default: peft's choice for the kind of model; for models of this
    library the maps of queries, keys, values and outputs, and the SwiGLUs."""


@dataclass(frozen=True)
class TuneSettings(RunSettings):
    """What fine-tuning on chats and on preferences have in common."""

    task: ClassVar[str]
    preset: ClassVar[str | None] = None  # type: ignore[misc]  # there are none
    init: Path | None = None
    """Folder of the model to start from, the same as MODEL: exported by `prism train`, or a run folder. With --lora it may be a
    model of transformers."""
    steps: int = field(default=0, metadata={"min": 0})
    """Number of optimizer steps. 0: as many as `epochs` need."""
    epochs: float = field(default=3.0, metadata={"min": 0})
    """Number of passes over the data; ignored if `steps` is given."""
    chat_template: Path | None = None
    """File with a chat template in jinja2. None: the template of the model's tokenizer, or else the default one. The exported
    model has it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    schedule: ScheduleSettings = field(default_factory=lambda: ScheduleSettings(warmup=20))
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: ChatDataSettings = field(default_factory=ChatDataSettings)

    def check(self) -> None:
        super().check()
        self.data.check()
        command = command_of(self.task)
        if self.init is None:
            raise ValueError(
                f"the model to start from is missing: give its folder, as in `{command} MODEL --data FILE`"
            )
        if not self.data.sources:
            raise ValueError(f"the data to train on are missing: give files with `{command} MODEL --data FILE …`")
        if not self.steps and not self.epochs:
            raise ValueError("steps and epochs are both 0: set one of them")
        if not 0 <= self.lora.dropout < 1:
            raise ValueError(f"lora.dropout must be at least 0 and below 1, got {self.lora.dropout}")
        if self.parallel.context > 1:
            raise ValueError(f"{command} trains on whole sequences: omit --parallel.context")
        if self.lora.rank and self.parallel.mode == "fsdp":
            raise ValueError("LoRA is trained with --parallel none or ddp: a model with frozen weights is not sharded")

    def for_samples(self, samples: int) -> Self:
        """Settings with epochs converted to steps, for this number of samples."""
        return replace(self, steps=self.steps or max(1, round(self.epochs * samples / self.batch.sequences)))


@dataclass(frozen=True)
class SftSettings(TuneSettings):
    """Fine-tune a language model on chats, or resume such a run. MODEL is the folder of a trained model. Only the answers are
    learned.

    Settings are read in this order, and later ones win:
    - the settings stored in the run folder, if it holds a run
    - the TOML file given with --config
    - the flags
    """

    task: ClassVar[str] = "sft"
    out: Path = Path("runs/sft")
    """Run folder: settings, log, checkpoints and, at the end, the model or the adapter, in the folder model."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-4, weight_decay=0.0))
    data: SftDataSettings = field(default_factory=SftDataSettings)


@dataclass(frozen=True)
class DpoSettings(TuneSettings):
    """Train a language model to prefer the better of two answers (direct preference optimization), or resume such a run. MODEL
    is the folder of a trained model, which is also the reference.

    Settings are read in this order, and later ones win:
    - the settings stored in the run folder, if it holds a run
    - the TOML file given with --config
    - the flags
    """

    task: ClassVar[str] = "dpo"
    out: Path = Path("runs/dpo")
    """Run folder: settings, log, checkpoints and, at the end, the model or the adapter, in the folder model."""
    epochs: float = field(default=1.0, metadata={"min": 0})
    """Number of passes over the data; ignored if `steps` is given."""
    beta: float = 0.1
    """How strongly the model is kept near the reference: larger is nearer."""
    batch: BatchSettings = field(default_factory=lambda: BatchSettings(16))
    """A sample is a pair of answers."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5, weight_decay=0.0))

    def check(self) -> None:
        super().check()
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"beta must be above 0, got {self.beta}")


BLANK: dict[str, TuneSettings] = {"sft": SftSettings(), "dpo": DpoSettings()}
"""The default settings of each task."""


def no_presets(task: str, name: str | None) -> Any:
    """The default settings of a task; there are no other presets."""
    if name is not None:
        raise ValueError(f"{command_of(task)} has no presets, got --preset {name}")
    return BLANK[task]


def command_line(settings: TuneSettings) -> str:
    """The `prism train sft …` or `prism train dpo …` command that gives these settings."""
    return train_command(settings.task, settings, BLANK[settings.task])
