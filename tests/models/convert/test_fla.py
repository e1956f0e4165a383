"""Models of flash-linear-attention become ours with the same logits, and come back with the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prism.cli import main
from prism.models import PrismConfig, PrismForCausalLM, convert_model
from prism.models.convert import fla
from tests.helpers import assert_close
from tests.models.convert import foreign

ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "grouped value heads": {"num_v_heads": 6},
    "negative eigenvalues": {"allow_neg_eigval": True},
    "no gate": {"use_gate": False},
    "gate by a sigmoid": {"output_gate_activation": "sigmoid"},
    "gate by its other name": {"output_gate_activation": "silu"},
    "no convolution": {"use_short_conv": False},
    "two taps": {"conv_size": 2},
    "softmax": {"attn": ATTENTION},
    "window": {"attn": [{**ATTENTION, "window_size": 3}, {"layers": [2], "num_heads": 2}], "num_hidden_layers": 3},
}


def ids(count: int = 9) -> torch.Tensor:
    return torch.randint(40, (2, count), generator=torch.Generator().manual_seed(1))


def ours(folder: Path, dtype: torch.dtype = torch.float64) -> PrismForCausalLM:
    model = PrismForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert isinstance(model, PrismForCausalLM)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_logits_are_the_same(name: str, tmp_path: Path) -> None:
    theirs = foreign.save(tmp_path / "theirs", **CONFIGS[name])
    expected = foreign.logits(theirs, ids())
    convert_model(theirs, tmp_path / "ours")
    assert_close("float64", ours(tmp_path / "ours")(ids()).logits, expected, 1e-9)
    assert_close("float32", ours(tmp_path / "ours", torch.float32)(ids()).logits.double(), expected, 1e-5)
    for steps in (1, 2):
        convert_model(theirs, tmp_path / f"{steps}", rule="prism", options={"steps": steps})
        assert_close(f"L = {steps}", ours(tmp_path / f"{steps}")(ids()).logits, expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_gives_the_same_tensors_and_configuration(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = foreign.save(tmp_path / "theirs", dtype=dtype, **CONFIGS[name])
    for options in ({}, {"rule": "prism", "options": {"steps": 1}}):
        convert_model(theirs, tmp_path / "ours", force=True, **options)
        convert_model(tmp_path / "ours", tmp_path / "back", to="fla", force=True)
        before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
        assert before.keys() == after.keys()
        for tensor, x in before.items():
            assert after[tensor].dtype == dtype and torch.equal(after[tensor], x), tensor
        first, last = (json.loads((folder / "config.json").read_text()) for folder in (theirs, tmp_path / "back"))
        assert (
            fla.config_from(first, "gated_delta", {}).layer_plan == fla.config_from(last, "gated_delta", {}).layer_plan
        )
        changed = {field for field in first if first[field] != last[field]}
        assert changed <= {"attn"}  # with its defaults written out


def test_a_model_trained_here_becomes_one_of_fla(tmp_path: Path) -> None:
    """Without a source, and with copies of key heads that training has changed."""
    theirs = foreign.save(tmp_path / "theirs", num_v_heads=4)
    model = ours(convert_model(theirs, tmp_path / "ours"), torch.float32)
    with torch.no_grad():
        model.model.layers[1].mixer.rule.qkv.weight[5] += 1.0
    model.save_pretrained(tmp_path / "changed")
    convert_model(tmp_path / "changed", tmp_path / "back", to="fla")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_heads"] == 4
    with torch.no_grad():
        assert_close("logits", foreign.logits(tmp_path / "back", ids()), model.double()(ids()).logits, 1e-9)
    del model.config.converted_from
    model.float().save_pretrained(tmp_path / "new")
    convert_model(tmp_path / "new", tmp_path / "fresh", to="fla")
    with torch.no_grad():
        assert_close("logits", foreign.logits(tmp_path / "fresh", ids()), model.double()(ids()).logits, 1e-9)


def test_fla_has_these_tensors_and_defaults(tmp_path: Path) -> None:
    """What foreign.py and fla.DEFAULTS say is what fla says; an upgrade that changes it is seen here."""
    pytest.importorskip("fla")
    from fla.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    default = GatedDeltaNetConfig()
    assert {name: getattr(default, name) for name in fla.DEFAULTS} == fla.DEFAULTS
    for name in ("plain", "tied", "grouped value heads", "no gate", "no convolution"):
        config = {**foreign.SMALL, **CONFIGS[name]}
        model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**config))
        assert {name: tuple(x.shape) for name, x in model.named_parameters()} == foreign.shapes(config)
    folder = foreign.save(tmp_path / "theirs", num_v_heads=6)
    convert_model(folder, tmp_path / "ours")
    back = convert_model(tmp_path / "ours", tmp_path / "back", to="fla")
    again = GatedDeltaNetForCausalLM.from_pretrained(back).state_dict()
    assert all(torch.equal(again[name], x) for name, x in load_file(folder / "model.safetensors").items())
    q, k, v = (torch.randn(1, 5, 2, size) for size in (3, 3, 4))
    beta, g = torch.rand(1, 5, 2), -torch.rand(1, 5, 2)
    read, _ = naive_recurrent_gated_delta_rule(q, k, v, beta, g)
    assert_close("recurrence", foreign.recurrence(q, k, v, beta, g), read, 1e-6)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"attnres_block_size": 2}, "attnres_block_size is 2 in its config.json, but our layers have no attention res"),
        ({"hidden_act": "powlu"}, "hidden_act is 'powlu' in its config.json, but our SwiGLU has SiLU"),
        ({"output_gate_activation": "tanh"}, "output_gate_activation is 'tanh'.*but ours has SiLU or a sigmoid"),
        ({"conv_size": 1}, "conv_size is 1 in its config.json, but a short convolution of ours has at least 2 taps"),
        ({"attn": {**ATTENTION, "qkv_bias": True}}, "attn.qkv_bias is True.*has no biases"),
        ({"num_v_heads": 3}, "num_v_heads is 3.*not a multiple of num_heads \\(2\\)"),
    ],
)
def test_what_has_no_counterpart_is_named(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=complaint):
        convert_model(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("layers", "settings", "complaint"),
    [
        ("prism", {}, "layer 0 is PRISM with 2 writes, which flash-linear-attention's Gated DeltaNet does not have"),
        ("gated_delta+mamba2", {}, "layer 1 is 'mamba2'"),
        ("gated_delta+gated_delta(forget=channel)", {}, "layer 1 is 'gated_delta' with a decay per channel, which"),
        ("softmax", {}, "the model has no gated_delta layer"),
        (
            "gated_delta",
            {},
            "norm_eps is 1e-06 in the model and 1e-05 in its rule.*--norm-eps 1e-05.*train with --model.norm-eps 1e-05",
        ),
        ("gated_delta+gated_delta(gate=false)", {"norm_eps": 1e-5}, "layers 0 and 1 have different use_gate"),
        ("gated_delta", {"norm_eps": 1e-5, "intermediate_size": 0}, "intermediate_size is 0"),
        (
            "gated_delta+softmax(conv_size=4)",
            {"norm_eps": 1e-5},
            "layer 1 is softmax attention with options that flash-linear",
        ),
        (
            "gated_delta+softmax(gate=true)",
            {"norm_eps": 1e-5},
            "layer 1 is softmax attention with options that flash-linear",
        ),
    ],
)
def test_what_fla_does_not_have_is_named(layers: str, settings: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
    PrismForCausalLM(PrismConfig(layers=layers, **{**sizes, **settings})).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=complaint):
        convert_model(tmp_path / "ours", tmp_path / "theirs", to="fla")
    assert not (tmp_path / "theirs").exists()


def test_one_epsilon_for_all_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model trained with the defaults has two, and is converted with the one that is given."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "num_hidden_layers": 2}
    before = PrismForCausalLM(PrismConfig(layers="gated_delta", **sizes)).eval()
    before.save_pretrained(tmp_path / "ours")
    command = ["convert", str(tmp_path / "ours"), "--output", str(tmp_path / "theirs"), "--to", "fla"]
    assert main([*command, "--norm-eps", "1e-5"]) == 0
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["norm_eps"] == 1e-5
    after = PrismForCausalLM.from_pretrained(convert_model(tmp_path / "theirs", tmp_path / "back")).eval()
    assert after.config.norm_eps == after.model.layers[0].mixer.rule.norm.norm.eps == 1e-5
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close("logits", after(tokens).logits, before(tokens).logits, 0.05)
    for epsilon in ("0", "-1", "nan", "1"):
        assert main([*command, "--force", "--norm-eps", epsilon]) == 2
        assert "norm_eps must be above 0 and below 1" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a model of ours keeps its epsilons: leave it out"):
        convert_model(tmp_path / "theirs", tmp_path / "again", norm_eps=1e-5)
