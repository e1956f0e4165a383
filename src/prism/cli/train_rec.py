"""`prism train rec`: settings from a preset, a TOML file and flags; then the loop, and a look at the test events."""

from __future__ import annotations

from collections.abc import Sequence

from prism.cli.flags import parse_settings
from prism.train.rec import train_rec
from prism.train.rec_presets import preset
from prism.train.rec_settings import RecSettings


def train(arguments: Sequence[str]) -> None:
    settings = parse(arguments)
    outcome = train_rec(settings)
    if outcome.model is None:
        return
    best = "" if outcome.best_step is None else f", of which {outcome.best_step} was the best"
    print(f"trained {outcome.step} steps{best}; the model is in {outcome.model}")


def parse(arguments: Sequence[str]) -> RecSettings:
    return parse_settings(arguments, "rec", RecSettings(), preset)
