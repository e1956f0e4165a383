"""Models, configurations and runs of an earlier version keep the defaults that rule options had then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from prism import rules
from prism.language.model import build_model, started_from
from prism.language.settings import ModelSettings, Settings
from prism.models import PrismConfig, PrismForCausalLM
from prism.models.loading import config_sha256, open_weights
from prism.nn.pattern import format_layers, parse_layers
from prism.recommend.config import PrismRecConfig
from prism.recommend.model import PrismForRecommendation
from prism.rules.options import RULE_DEFAULTS
from prism.rules.prism import Prism

SIZES = {"vocab_size": 16, "hidden_size": 16, "num_heads": 2}
EARLIER = ("prism+mom(inner=prism)+prism(preset=paper)+prism(gate_by=sigmoid)+prism(gate=False)", "prism*2+gated_delta")


@pytest.mark.parametrize("layers", EARLIER)
def test_a_model_of_an_earlier_version_keeps_its_defaults(layers: str, tmp_path: Path) -> None:
    """Version 0.1.0 wrote no number of its defaults: then the output gate of PRISM is SiLU."""
    now = PrismForCausalLM(PrismConfig(**SIZES, layers=layers)).eval()
    now.save_pretrained(tmp_path / "now")
    shutil.copytree(tmp_path / "now", tmp_path / "then")
    without_number(tmp_path / "then")
    then = open_weights(PrismForCausalLM, tmp_path / "then", "cpu")
    wanted = {EARLIER[0]: ["silu", "silu", None, "sigmoid", "silu"], EARLIER[1]: ["silu", "silu", "silu"]}
    assert gates(then) == wanted[layers]
    tokens = torch.arange(8)[None]
    assert torch.equal(open_weights(PrismForCausalLM, tmp_path / "now", "cpu")(tokens).logits, now(tokens).logits)
    assert not torch.equal(then(tokens).logits, now(tokens).logits)
    then.save_pretrained(tmp_path / "again")
    again = open_weights(PrismForCausalLM, tmp_path / "again", "cpu")
    assert again.config.rule_defaults == 0
    assert torch.equal(again(tokens).logits, then(tokens).logits)
    assert config_sha256(then) != config_sha256(now)
    assert "rule_defaults" in str(config_error(tmp_path / "now", RULE_DEFAULTS + 1))


def config_error(folder: Path, number: int) -> ValueError:
    """The error for a model that a later version saved."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rule_defaults": number}))
    with pytest.raises(ValueError, match="a later version may have saved this model") as caught:
        open_weights(PrismForCausalLM, folder, "cpu")
    return caught.value


def without_number(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder as version 0.1.0 wrote it."""
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("rule_defaults") == RULE_DEFAULTS
    (folder / "config.json").write_text(json.dumps(config))
    return dict(config)


def gates(model: Any) -> list[str | None]:
    found = [layer.mixer.rule for layer in model.model.layers]
    return [getattr(getattr(rule, "inner", rule), "gate_by", None) for rule in found]


@pytest.mark.parametrize(
    "read",
    [
        lambda path, values: PrismConfig.from_json_file(path),
        lambda path, values: PrismConfig(**values),
        lambda path, values: AutoConfig.for_model(**values),
        lambda path, values: PrismConfig.from_dict(values),
        lambda path, values: AutoConfig.from_pretrained(path.parent),
    ],
)
def test_every_way_to_read_a_configuration_keeps_them(read: Callable[..., PrismConfig], tmp_path: Path) -> None:
    PrismForCausalLM(PrismConfig(**SIZES, layers="prism")).save_pretrained(tmp_path)
    assert (
        read(tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())).rule_defaults
        == RULE_DEFAULTS
    )
    values = without_number(tmp_path)
    config = read(tmp_path / "config.json", values)
    assert config.rule_defaults == 0 and config.layer_plan[0].options == {"gate_by": "silu"}
    assert PrismConfig(**config.to_dict()).rule_defaults == 0


def test_a_run_from_an_earlier_model_names_no_new_option(tmp_path: Path) -> None:
    """So that the command that started such a run in the earlier version still resumes it; mom's could not be written."""
    PrismForCausalLM(PrismConfig(**SIZES, layers=EARLIER[0])).save_pretrained(tmp_path)
    without_number(tmp_path)
    settings = started_from(Settings(init=tmp_path))
    assert settings.model.layers == format_layers(parse_layers(EARLIER[0])) and settings.model.rule_defaults == 0
    model = build_model(settings.model, 16, 0)
    assert gates(model) == ["silu", "silu", None, "sigmoid", "silu"]


def test_single_token_titans_of_an_earlier_version_keep_their_rate(tmp_path: Path) -> None:
    layers = (
        "titans(mini_batch=1)+mom(inner=titans)+titans(mini_batch=1, base_lr=0.2)+titans(mini_batch=1, momentum=false)"
    )
    options = {"mom": {"inner_options": {"mini_batch": 1}}}
    model = PrismForCausalLM(PrismConfig(**SIZES, layers=layers, rule_options=options))
    assert largest_rates(model) == [0.5, 0.5, 0.2, 1.0]
    model.save_pretrained(tmp_path)
    assert largest_rates(open_weights(PrismForCausalLM, tmp_path, "cpu")) == [0.5, 0.5, 0.2, 1.0]
    path, config = tmp_path / "config.json", without_number(tmp_path)
    for earlier in ({}, {"rule_defaults": 1}):
        path.write_text(json.dumps({**config, **earlier}))
        assert largest_rates(open_weights(PrismForCausalLM, tmp_path, "cpu")) == [1.0, 1.0, 0.2, 1.0]


def largest_rates(model: Any) -> list[float]:
    found = [layer.mixer.rule for layer in model.model.layers]
    return [getattr(rule, "inner", rule).base_lr for rule in found]


def test_settings_build_models_with_their_defaults() -> None:
    settings = ModelSettings(hidden_size=16, num_heads=2, num_hidden_layers=1)
    for number, gate_by in ((None, "sigmoid"), (RULE_DEFAULTS, "sigmoid"), (1, "sigmoid"), (0, "silu")):
        model = build_model(ModelSettings(**{**vars(settings), "rule_defaults": number}), 600, 0)
        assert gates(model) == [gate_by]


def test_models_of_bytes_keep_silu() -> None:
    """They start with drawn weights, with which a sigmoid is no better."""
    settings = ModelSettings(hidden_size=16, num_heads=2, num_hidden_layers=1)
    assert gates(build_model(settings, 320, 0)) == ["silu"]
    assert gates(build_model(ModelSettings(**{**vars(settings), "options": ("prism.gate_by=sigmoid",)}), 320, 0)) == [
        "sigmoid"
    ]


def test_recommenders_keep_silu() -> None:
    """A sigmoid was found to be better on text only."""
    assert gates(PrismForRecommendation(PrismRecConfig(5, 16, 2, "prism"))) == ["silu"]
    chosen = PrismRecConfig(5, 16, 2, "prism", rule_options={"prism": {"gate_by": "sigmoid"}})
    assert gates(PrismForRecommendation(chosen)) == ["sigmoid"]


class OwnPrism(Prism):
    """A rule of one's own without the option that has another default now."""

    def __init__(self, width: int, heads: int, *, steps: int = 3) -> None:
        super().__init__(width, heads, steps=steps)


def test_a_rule_made_from_prism_needs_no_such_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_REGISTERED", {})
    monkeypatch.setattr(OwnPrism, "name", "OwnPrism")
    rules.register("own_prism", OwnPrism)
    model = PrismForRecommendation(PrismRecConfig(5, 16, 2, "own_prism(steps=2)"))
    assert model.model.layers[0].mixer.rule.write_rank == 2
