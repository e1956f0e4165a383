"""`prism train rec`: settings from a preset, a TOML file and flags; then training, and a report on the test events."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prism.cli.evaluate_rec import evaluate_rec
from prism.cli.flags import parse_settings
from prism.files import not_there
from prism.messages import INTERRUPTED
from prism.recommend.settings import RecSettings, preset
from prism.recommend.task import train_rec
from prism.recommend.update import update_settings


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
    """Settings from the words after `prism train rec`; with --update, those of the run to update are the defaults."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--update", type=Path)
    base: Path | None = early.parse_known_args(arguments)[0].update
    if base is None or base.name == "None":
        return parse_settings(arguments, "rec", RecSettings(), preset)
    if not base.is_dir():
        raise FileNotFoundError(not_there(str(base)))
    settings = parse_settings(arguments, "rec", RecSettings(), lambda name: update_settings(base))
    return replace(settings, update=base.resolve())
