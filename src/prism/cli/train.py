"""`prism train lm`: settings from a preset, a TOML file and flags; then the loop."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from prism.train.loop import train
from prism.train.overrides import override, read_toml
from prism.train.presets import preset
from prism.train.run import stored_settings
from prism.train.settings import Settings


def train_lm(arguments: Sequence[str]) -> None:
    outcome = train(parse(arguments))
    if outcome.model is not None:
        score = "" if outcome.score is None else f" at {outcome.score.bits_per_byte:.4f} bits per byte"
        print(f"trained {outcome.step} steps{score}; the model is in {outcome.model}")


def parse(arguments: Sequence[str]) -> Settings:
    """preset (or what the run folder was started with) < TOML file < flags."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--config", "--out"):
        early.add_argument(flag)
    given, _ = early.parse_known_args(arguments)
    toml = {} if given.config is None else read_toml(Path(given.config))
    name: str | None = given.preset or toml.get("preset")
    stored = None if name else stored_settings(Path(given.out or toml.get("out") or Settings.out))
    settings = override(stored or preset(name or "tiny"), toml, str(given.config))
    parsed, unknown = tyro.cli(
        Settings, prog="prism train lm", args=list(arguments), default=settings, return_unknown_args=True
    )
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]}{_hint(unknown[0])}; --help lists them all")
    parsed.check()
    return replace(parsed, config=None)  # it is part of these settings now: a resume must not apply it again


def _hint(flag: str) -> str:
    known = _flags(Settings())
    close = difflib.get_close_matches(flag.partition("=")[0].replace("_", "-"), known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _flags(settings: Any, prefix: str = "--") -> list[str]:
    flags = []
    for field in fields(settings):
        value, flag = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        flags += _flags(value, f"{flag}.") if is_dataclass(value) else [flag]
    return flags
