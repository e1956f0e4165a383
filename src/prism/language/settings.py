"""Every choice of a language model's training, and presets of sizes. The text under a field is its command-line help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    vocab_size: int | None = None
    """Rows of the embedding; None: the tokenizer's size, up to the next multiple of 64."""
    tie_word_embeddings: bool = True
    """One matrix for tokens in and out."""


@dataclass(frozen=True)
class DataSettings:
    sources: tuple[str, ...] = ()
    """Files or folders of text, jsonl or parquet (.gz and .xz too), or hub:owner/dataset[:configuration]. None: the source
    text of this machine's own Python standard library."""
    pattern: str | None = None
    """Which files a folder stands for, as a glob such as *.py; None: text, markdown, jsonl and parquet."""
    field: str = "text"
    """The column of jsonl and parquet files that holds the text."""
    tokenizer: str = "bytes"
    """bytes, bpe (learned from the data), or the path of a tokenizer.json."""
    bpe_size: int = 8192
    """Number of tokens a learned BPE has."""
    end_token: str | None = None
    """The token of a tokenizer.json that ends a document; None: the first of the usual names it has."""
    validation: float = 0.01
    """Share of the data held out to validate on."""
    split: Literal["auto", "document", "tail"] = "auto"
    """What is held out: every n-th document, or the tail of the data; auto: documents if there are enough of them."""
    max_bytes: int | None = None
    """Read no more than about this many bytes of text (up to the end of a document)."""
    context: int = 256
    """Tokens in a training sample."""
    separate_documents: bool = True
    """Nothing is carried from one document to the next inside a sample."""
    cache: Path | None = None
    """Where tokens are kept; None: $PRISM_CACHE, or prism in the user's cache folder."""
    verify: bool = True
    """Compare the tokens with their hashes before every run."""

    def recipe(self) -> Recipe:
        """The part that decides which tokens come out."""
        return Recipe(
            sources=self.sources,
            pattern=self.pattern,
            field=self.field,
            tokenizer=self.tokenizer,
            bpe_size=self.bpe_size,
            end_token=self.end_token,
            validation=self.validation,
            split=self.split,
            max_bytes=self.max_bytes,
        )


@dataclass(frozen=True)
class Settings(RunSettings):
    """Train a language model.

    Later beats earlier: the preset (or, in a run folder that exists, the settings it was started with), the TOML file,
    the flags.
    """

    preset: str | None = None
    """Sizes to start from: tiny, 30m, 130m, 340m or 1.3b (parameters with a vocabulary of 32 768). None: tiny."""
    out: Path = Path("runs/lm")
    """The run folder: checkpoints, log, settings and, at the end, the model."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)

    def least(self) -> dict[str, tuple[float | None, float]]:
        return {**super().least(), "data.context": (self.data.context, 1)}


# Presets: sizes that work. Heads are 64 or 128 wide, which suits the kernels.


def tiny() -> Settings:
    """Minutes on a laptop."""
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
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]()


def command_line(settings: Settings) -> str:
    """`prism train lm …`, which run again gives the same settings."""
    return train_command("lm", settings, preset(settings.preset or "tiny"))
