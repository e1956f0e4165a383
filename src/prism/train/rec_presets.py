"""The models that recommenders are known by, as settings; their sizes are those of prism/models/rec_config.py."""

from __future__ import annotations

import difflib

from prism.models.rec_config import PrismRecConfig, hstu, sasrec
from prism.train.rec_settings import RecModelSettings, RecSettings


def prism() -> RecSettings:
    return RecSettings(preset="prism")


def preset_sasrec() -> RecSettings:
    return RecSettings(preset="sasrec", model=_model(sasrec(1)))


def preset_hstu() -> RecSettings:
    return RecSettings(preset="hstu", model=_model(hstu(1)))


def _model(config: PrismRecConfig) -> RecModelSettings:
    assert isinstance(config.layers, str)
    return RecModelSettings(
        layers=config.layers,
        num_hidden_layers=config.num_hidden_layers,
        num_heads=config.num_heads,
        hidden_size=config.hidden_size,
        intermediate_size=0 if config.intermediate_size == 0 else None,
        dropout=config.dropout,
        embedding_scale=config.embedding_scale,
    )


PRESETS = {"prism": prism, "sasrec": preset_sasrec, "hstu": preset_hstu}


def preset(name: str | None) -> RecSettings:
    name = name or "prism"
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown preset {name!r}{hint}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]()
