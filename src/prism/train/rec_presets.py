"""Presets of `prism train rec`: the published models that others are compared with, as settings."""

from __future__ import annotations

import difflib
from typing import Any

from prism.models.rec_config import HSTU, SASREC
from prism.train.overrides import override
from prism.train.rec_settings import RecSettings

PRESETS: dict[str, dict[str, Any]] = {"prism": {}, "sasrec": SASREC, "hstu": HSTU}
"""What each changes in the section `model`."""


def preset(name: str | None) -> RecSettings:
    """Settings of a preset; None is "prism"."""
    name = name or "prism"
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown preset {name!r}{hint}: choose from {', '.join(PRESETS)}")
    return override(RecSettings(preset=name), {"model": PRESETS[name]}, f"preset {name}")
