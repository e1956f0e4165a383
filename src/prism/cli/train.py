"""`prism train lm`: settings from a preset, a TOML file and flags; then the loop."""

from __future__ import annotations

from collections.abc import Sequence

from prism.cli.flags import parse_settings
from prism.language.settings import Settings, preset
from prism.language.task import train_lm
from prism.messages import INTERRUPTED


def train(arguments: Sequence[str]) -> int:
    outcome = train_lm(parse(arguments))
    if outcome.model is not None:
        score = "" if outcome.score is None else f" at {outcome.score.bits_per_byte:.4f} bits per byte"
        print(f"trained {outcome.step} steps{score}; the model is in {outcome.model}")
    return INTERRUPTED if outcome.stopped else 0


def parse(arguments: Sequence[str]) -> Settings:
    return parse_settings(arguments, "lm", Settings(), lambda name: preset(name or "tiny"))
