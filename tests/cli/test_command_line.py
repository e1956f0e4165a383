"""The command in a model card gives the settings it was made from."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from prism.cli.train import parse
from prism.language.export import model_card
from prism.language.settings import PRESETS, Settings, command_line, preset
from prism.overrides import override

CHANGES: list[dict[str, Any]] = [
    {},
    {"steps": 7, "seed": 3, "compile": True, "out": "some where/run"},
    {"model": {"layers": "prism*3+softmax", "options": ["prism.steps=3", "softmax.kv_heads=2"], "head_dim": None}},
    {"data": {"separate_documents": False, "sources": ["a file.txt", "b.jsonl"], "max_bytes": 1000}},
    {"optimizer": {"betas": [0.8, 0.99], "clip": None, "name": "muon"}, "resume": False},
]


@pytest.mark.parametrize("name", [None, *PRESETS])
@pytest.mark.parametrize("changes", CHANGES, ids=range(len(CHANGES)))
def test_the_command_gives_the_same_settings(
    name: str | None, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no run folder that could lend its settings
    settings = override(Settings() if name is None else preset(name), changes, "test")
    words = shlex.split(command_line(settings))
    assert words[:3] == ["prism", "train", "lm"]
    parsed = parse(words[3:])
    assert override(parsed, {"preset": name}, "test") == settings


def test_a_card_says_what_how_and_how_well() -> None:
    settings = override(Settings(), {"steps": 20, "model": {"layers": "gated_delta"}}, "test")
    records: list[dict[str, Any]] = [
        {"step": 10, "loss": 5.5, "tokens": 1},
        {"step": 20, "loss": 4.25},
        {"step": 20, "validation_nats": 4.5, "validation_perplexity": 90.02, "validation_bits_per_byte": 6.49},
    ]
    data = {"tokens": 1000, "text_bytes": 900}
    card = model_card("tester", settings, data, {"step": 20, "skipped": 0}, records, 12345)
    for fact in (
        "12,345 parameters",
        "layers of `gated_delta`",
        "prism train lm --steps 20 --model.layers gated_delta",
        "5.5000 nats at step 10, 4.2500 at step 20",
        "6.4900 bits per byte",
        "81,920 tokens in 20 steps",
        "## Licence",
    ):
        assert fact in card
    assert "not logged" in model_card("tester", settings, data, {"step": 20, "skipped": 0}, [], 12345)
