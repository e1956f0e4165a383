"""`prism adapt`: fine-tune a saved model with a PRISM adapter, with settings from a TOML file and flags."""

from __future__ import annotations

from collections.abc import Sequence

from prism.cli.flags import parse_settings
from prism.language.adapt import adapt as train_adapter
from prism.language.adapt_settings import AdaptSettings, no_presets
from prism.messages import INTERRUPTED


def adapt(arguments: Sequence[str]) -> int:
    """Train until the last step or a signal; returns the exit code."""
    result = train_adapter(parse(arguments))
    if result.model is not None:
        score = "" if result.score is None else f" at {result.score.bits_per_byte:.4f} bits per byte"
        print(f"trained {result.step} steps{score}; the adapter is in {result.model}")
    return INTERRUPTED if result.stopped else 0


def parse(arguments: Sequence[str]) -> AdaptSettings:
    """Settings from the words after `prism adapt`, of which the first may be the model's folder."""
    words = list(arguments)
    if words and not words[0].startswith("-"):
        words.insert(0, "--base.folder")
    return parse_settings(words, "adapt", AdaptSettings(), no_presets, " [MODEL]")
