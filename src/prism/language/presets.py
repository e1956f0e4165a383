"""Sizes that work, as functions that return settings. Heads are 64 or 128 wide, which is what kernels like."""

from __future__ import annotations

from prism.messages import did_you_mean
from prism.train.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ScheduleSettings,
    Settings,
    ValidationSettings,
)


def tiny() -> Settings:
    """Minutes on a laptop."""
    return Settings(preset="tiny")


def preset_30m() -> Settings:
    return _sized(
        "30m",
        ModelSettings(hidden_size=384, num_hidden_layers=10, num_heads=3, head_dim=128),
        1024,
        64,
        32,
        10_000,
        2e-3,
    )


def preset_130m() -> Settings:
    return _sized(
        "130m",
        ModelSettings(hidden_size=768, num_hidden_layers=12, num_heads=6, head_dim=128),
        2048,
        128,
        16,
        10_000,
        1e-3,
    )


def preset_340m() -> Settings:
    return _sized(
        "340m",
        ModelSettings(hidden_size=1024, num_hidden_layers=24, num_heads=8, head_dim=128),
        2048,
        256,
        8,
        15_000,
        8e-4,
    )


def preset_1300m() -> Settings:
    model = ModelSettings(
        hidden_size=2048, num_hidden_layers=24, num_heads=16, head_dim=128, gradient_checkpointing=True
    )
    return _sized("1.3b", model, 2048, 512, 8, 25_000, 4e-4)


def _sized(
    name: str, model: ModelSettings, context: int, sequences: int, micro: int, steps: int, lr: float
) -> Settings:
    return Settings(
        preset=name,
        steps=steps,
        model=model,
        data=DataSettings(context=context),
        batch=BatchSettings(sequences, micro),
        optimizer=OptimizerSettings(lr=lr),
        schedule=ScheduleSettings(warmup=steps // 50),
        validation=ValidationSettings(every=500, sequences=256),
        checkpoint=CheckpointSettings(every=500),
    )


PRESETS = {"tiny": tiny, "30m": preset_30m, "130m": preset_130m, "340m": preset_340m, "1.3b": preset_1300m}


def preset(name: str) -> Settings:
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]()
