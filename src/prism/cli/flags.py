"""Settings of a run from a preset, a TOML file and flags, whatever is trained."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from prism.messages import did_you_mean
from prism.overrides import override, read_toml
from prism.train.run import resumed_settings
from prism.train.settings import RunSettings

S = TypeVar("S", bound=RunSettings)


def parse_settings(arguments: Sequence[str], task: str, blank: S, preset: Callable[[str | None], S]) -> S:
    """preset (or what the run folder was started with) < TOML file < flags.

    Args:
        task: as in `prism train lm`.
        blank: the settings' defaults.
        preset: settings by name; None is the default one.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--preset", "--config", "--out"):
        early.add_argument(flag)
    given, _ = early.parse_known_args(arguments)
    toml = {} if given.config is None else read_toml(Path(given.config))
    override(blank, toml, str(given.config))  # whatever is wrong in it is told before any of it is used
    name: str | None = given.preset or toml.get("preset")
    stored = None if name else resumed_settings(Path(given.out or toml.get("out") or blank.out), task, blank)
    settings = override(stored or preset(name), toml, str(given.config))
    parsed, unknown = tyro.cli(
        type(blank), prog=f"prism train {task}", args=list(arguments), default=settings, return_unknown_args=True
    )
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0].replace("_", "-"), _flags(blank), str)
        raise ValueError(f"unknown setting {unknown[0]}{hint}; --help lists them all")
    parsed.check()
    return replace(parsed, config=None)  # it is part of these settings now: a resume must not apply it again


def _flags(settings: Any, prefix: str = "--") -> list[str]:
    flags = []
    for field in fields(settings):
        value, flag = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        flags += _flags(value, f"{flag}.") if is_dataclass(value) else [flag]
    return flags
