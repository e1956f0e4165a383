"""`prism train rec`: settings from a preset, a TOML file and flags; then training, and a report on the test events."""

from __future__ import annotations

import os
from collections.abc import Sequence

from prism.cli.evaluate_rec import evaluate_rec
from prism.cli.flags import parse_settings
from prism.messages import INTERRUPTED
from prism.recommend.settings import RecSettings, preset
from prism.recommend.task import train_rec


def train(arguments: Sequence[str]) -> int:
    """Train or resume; returns the exit code."""
    settings = parse(arguments)
    outcome = train_rec(settings)
    if outcome.stopped:
        return INTERRUPTED
    if outcome.model is None or os.environ.get("RANK", "0") != "0":
        return 0
    best = "" if outcome.best_step is None else f", step {outcome.best_step} was the best"
    print(f"trained {outcome.step} steps{best}; the model is in {outcome.model}")
    if settings.report:
        evaluate_rec(
            outcome.model,
            filter_seen=settings.validation.filter_seen,
            baselines=("popular",),  # costs nothing, and says how much the model learned
            device=settings.device,
            output=outcome.run / "report",
        )
    return 0


def parse(arguments: Sequence[str]) -> RecSettings:
    return parse_settings(arguments, "rec", RecSettings(), preset)
