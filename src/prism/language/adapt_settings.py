"""Settings of `prism adapt`. The docstring of a field is its help text on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from prism.language.settings import DataSettings
from prism.overrides import train_command
from prism.train.settings import OptimizerSettings, RunSettings


@dataclass(frozen=True)
class BaseSettings:
    folder: Path | None = field(default=None, metadata={"short": True})
    """Folder of the model to adapt, the same as MODEL. It was saved by transformers or exported by `prism train lm`, or it is
    a run folder of that command."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class AdapterSettings:
    steps: int = field(default=2, metadata={"min": 2})
    """Number of writes per token, the base's included."""
    rank: int = field(default=16, metadata={"min": 1})
    """Rank of the maps from a layer's input to keys, gains and expected values."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers to adapt, from 0. Default: all that are Gated DeltaNet."""


@dataclass(frozen=True)
class AdaptDataSettings(DataSettings):
    sources: tuple[str, ...] = field(default=(), metadata={"short": True})
    """Text to train on (also: --data FILE …): text, jsonl or parquet files (also .gz and .xz), folders of them, or
    hub:owner/dataset[:configuration]."""
    validation: float = 0.05
    """Fraction of the data held out for validation."""
    separate_documents: bool = True
    """Reset the memories where a document starts inside a sample. Only models of this library can."""
    # No settings here: the tokenizer is the base's.
    tokenizer: ClassVar[str] = "bytes"  # type: ignore[misc]
    bpe_size: ClassVar[int] = 0  # type: ignore[misc]
    end_token: ClassVar[str | None] = None  # type: ignore[misc]


@dataclass(frozen=True)
class AdaptSettings(RunSettings):
    """Fine-tune a trained model with a PRISM adapter, or resume such a run. MODEL is the folder of a model with Gated DeltaNet
    layers; its weights do not change.

    Settings are read in this order, and later ones win:
    - the settings stored in the run folder, if it holds a run
    - the TOML file given with --config
    - the flags
    """

    preset: ClassVar[str | None] = None  # type: ignore[misc]  # there are none
    out: Path = Path("runs/adapt")
    """Run folder: settings, log, checkpoints and, at the end, the adapter, in the folder model."""
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(weight_decay=0.0))
    base: BaseSettings = field(default_factory=BaseSettings)
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    data: AdaptDataSettings = field(default_factory=AdaptDataSettings)

    def check(self) -> None:
        super().check()
        self.data.check()
        if self.base.folder is None:
            raise ValueError("the model to adapt is missing: give its folder, as in `prism adapt MODEL --data FILE`")
        if not self.data.sources:
            raise ValueError("the text to train on is missing: give files or folders with --data FILE …")
        if self.parallel.mode == "fsdp" or self.parallel.context > 1:
            raise ValueError(
                "prism adapt trains with --parallel none or ddp: the base is not sharded and sequences are not shared"
            )
        if not all(number >= 0 for number in self.adapter.layers):
            raise ValueError(f"adapter.layers must be numbers of layers, from 0, got {min(self.adapter.layers)}")


def no_presets(name: str | None) -> AdaptSettings:
    """The default settings; an adapter has no other presets."""
    if name is not None:
        raise ValueError(f"prism adapt has no presets, got --preset {name}")
    return AdaptSettings()


def command_line(settings: AdaptSettings) -> str:
    """The `prism adapt …` command that gives these settings."""
    return train_command("adapt", settings, AdaptSettings())
