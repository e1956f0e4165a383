"""The command that a run's settings stand for, however they were given: what they change about their preset."""

from __future__ import annotations

import shlex
from typing import Any

from prism.train.overrides import to_plain
from prism.train.presets import preset
from prism.train.settings import RunSettings, Settings


def command_line(settings: Settings) -> str:
    """`prism train lm …`, which run again gives the same settings."""
    return train_command("lm", settings, preset(settings.preset or "tiny"))


def train_command(task: str, settings: RunSettings, start: RunSettings) -> str:
    """`prism train TASK …`, with what `settings` change about their preset, `start`."""
    words = ["prism", "train", task, *(["--preset", settings.preset] if settings.preset else [])]
    return shlex.join([*words, *_differences(to_plain(start), to_plain(settings), "--")])


def _differences(start: dict[str, Any], now: dict[str, Any], prefix: str) -> list[str]:
    words: list[str] = []
    for key, value in now.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            words += _differences(start[key], value, f"{prefix}{name}.")
        elif value == start[key] or key == "preset":
            continue
        elif isinstance(value, bool):
            words += [f"{prefix}{name if value else f'no-{name}'}"]
        else:
            words += [f"{prefix}{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
