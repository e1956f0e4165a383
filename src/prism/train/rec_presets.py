"""Presets of `prism train rec`: the published models that others are compared with, as settings."""

from __future__ import annotations

from typing import Any

from prism.messages import did_you_mean
from prism.models.config import HSTU, SASREC
from prism.overrides import override
from prism.train.rec_settings import RecSettings

PRESETS: dict[str, dict[str, Any]] = {"prism": {}, "sasrec": SASREC, "hstu": HSTU}
"""What each changes in the section `model`."""


def preset(name: str | None) -> RecSettings:
    """Settings of a preset; None is "prism"."""
    name = name or "prism"
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}: choose from {', '.join(PRESETS)}")
    return override(RecSettings(preset=name), {"model": PRESETS[name]}, f"preset {name}")
