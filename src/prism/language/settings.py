"""Settings of a language model's training, and presets. The docstring of a field is its help text on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from prism.language.corpus import Recipe
from prism.messages import did_you_mean
from prism.overrides import train_command
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
class ModelSettings(StackSettings):
    """Sizes of the model."""

    vocab_size: int | None = None
    """Rows of the embedding. None: the tokenizer's size, rounded up to a multiple of 64."""
    intermediate_size: int | None = field(default=None, metadata={"min": 0})
    """Width of the SwiGLU in every layer. None: 8/3 of the width, rounded up to a multiple of 64. 0: no SwiGLUs."""
    tie_word_embeddings: bool = True
    """Share one matrix between input and output embeddings."""
    norm_eps: float | None = None
    """Epsilon of the norms outside the mixers. None: 1e-6."""


@dataclass(frozen=True)
class DataSettings(Recipe):
    """Where the text comes from, and how it becomes samples."""

    context: int = field(default=256, metadata={"min": 1})
    """Tokens per training sample."""
    separate_documents: bool = True
    """Reset the memories where a document starts inside a sample."""
    cache: Path | None = None
    """Folder for prepared tokens. None: $PRISM_CACHE, or prism in the user's cache folder."""
    verify: bool = True
    """Check the prepared tokens against their SHA-256 before training."""

    def recipe(self) -> Recipe:
        """The fields that decide which tokens come out: caches are keyed by these alone."""
        return Recipe(**{part.name: getattr(self, part.name) for part in fields(Recipe)})


@dataclass(frozen=True)
class SampleSettings:
    """Texts that the model writes while it is trained."""

    every: int = field(default=0, metadata={"min": 0})
    """Steps between texts that the model writes, for the terminal and the log. 0: none."""
    prompt: str = ""
    """Text that they continue. Empty: the start of a document."""
    tokens: int = field(default=64, metadata={"min": 1})
    """Maximum number of tokens of each."""
    temperature: float = field(default=0.8, metadata={"min": 0})
    """Sampling temperature. 0: greedy, always the most likely token."""


@dataclass(frozen=True)
class Settings(RunSettings):
    """Train a language model, or resume a run.

    Settings are read in this order, and later ones win:
    - the preset, or without --preset the settings stored in the run folder
    - the TOML file given with --config
    - the flags
    """

    preset: str | None = None
    """Preset to start from: tiny, 30m, 130m, 340m or 1.3b (parameters at a vocabulary of 32,768). None: tiny."""
    out: Path = Path("runs/lm")
    """Run folder: settings, log, checkpoints and, at the end, the exported model."""
    init: Path | None = None
    """Model folder to continue from, such as the output of `prism convert`, or run folder: its layers and sizes replace those
    in the model settings, its weights are the initial ones, and its tokenizer is used unless data.tokenizer is given. None: a
    new model."""
    z_loss: float = field(default=0.0, metadata={"min": 0})
    """Factor of the squared log-sum-exp of the logits, added to the training loss; it keeps their scale near 1. For example
    1e-4. 0: none."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)

    def check(self) -> None:
        super().check()
        self.data.check()


# Presets. Heads are 64 or 128 wide: the sizes at which the kernels are fastest.


def tiny() -> Settings:
    """Trains in minutes on a laptop."""
    return Settings(preset="tiny")


def preset_30m() -> Settings:
    return _sized(
        "30m",
        ModelSettings(hidden_size=384, num_hidden_layers=10, num_heads=3, head_dim=128),
        1024,
        64,
        32,
        10_000,
        2e-3,
    )


def preset_130m() -> Settings:
    return _sized(
        "130m",
        ModelSettings(hidden_size=768, num_hidden_layers=12, num_heads=6, head_dim=128),
        2048,
        128,
        16,
        10_000,
        1e-3,
    )


def preset_340m() -> Settings:
    return _sized(
        "340m",
        ModelSettings(hidden_size=1024, num_hidden_layers=24, num_heads=8, head_dim=128),
        2048,
        256,
        8,
        15_000,
        8e-4,
    )


def preset_1300m() -> Settings:
    model = ModelSettings(
        hidden_size=2048, num_hidden_layers=24, num_heads=16, head_dim=128, gradient_checkpointing=True
    )
    return _sized("1.3b", model, 2048, 512, 8, 25_000, 4e-4)


def _sized(
    name: str, model: ModelSettings, context: int, sequences: int, micro: int, steps: int, lr: float
) -> Settings:
    return Settings(
        preset=name,
        steps=steps,
        model=model,
        data=DataSettings(context=context),
        batch=BatchSettings(sequences, micro),
        optimizer=OptimizerSettings(lr=lr),
        schedule=ScheduleSettings(warmup=steps // 50),
        validation=ValidationSettings(every=500, sequences=256),
        checkpoint=CheckpointSettings(every=500),
    )


PRESETS = {"tiny": tiny, "30m": preset_30m, "130m": preset_130m, "340m": preset_340m, "1.3b": preset_1300m}


def preset(name: str) -> Settings:
    """The settings of a preset by name."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]()


def command_line(settings: Settings) -> str:
    """The `prism train lm …` command that gives these settings."""
    return train_command("lm", settings, preset(settings.preset or "tiny"))
