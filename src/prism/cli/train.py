"""`prism train lm`: train a language model with settings from a preset, a TOML file and flags."""

from __future__ import annotations

from collections.abc import Sequence

from prism.cli.flags import given_settings, parse_settings
from prism.language.settings import Settings, preset
from prism.language.task import continued, train_lm
from prism.messages import INTERRUPTED


def train(arguments: Sequence[str]) -> int:
    """Train until the last step or a signal; returns the exit code."""
    result = train_lm(continued(parse(arguments), given_settings(arguments, "model")))
    if result.model is not None:
        score = "" if result.score is None else f" at {result.score.bits_per_byte:.4f} bits per byte"
        print(f"trained {result.step} steps{score}; the model is in {result.model}")
    return INTERRUPTED if result.stopped else 0


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from the words after `prism train lm`."""
    return parse_settings(arguments, "lm", Settings(), lambda name: preset(name or "tiny"))
