"""Saved models come back, through transformers' Auto classes, with gates in float32 and without ever opening a pickle."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, dynamic_module_utils

from prism import rules
from prism.models import PrismConfig, PrismForCausalLM, PrismModel
from prism.models.auto import name_classes
from prism.models.loading import by_columns, fingerprint, maps_sha256, mismatch
from prism.nn import no_weight_decay
from prism.nn.parameters import gates
from tests.children import finish, start_children
from tests.helpers import assert_close
from tests.models.stacks import STACKS, config, label, model, tokens


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_save_and_load(layers: Any, tmp_path: Path) -> None:
    lm, ids = model(layers), tokens(1, 9)
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(again) is PrismForCausalLM
    assert again.config == lm.config
    assert not again.training
    saved, loaded = lm.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert_close("logits", again(ids).logits, lm(ids).logits, 1e-12)  # other addresses may be summed in another order
    assert not any(path.suffix == ".bin" for path in tmp_path.iterdir())


def test_the_backbone_alone(tmp_path: Path) -> None:
    lm = model("prism+softmax", torch.float32)
    lm.save_pretrained(tmp_path)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is PrismModel
    hidden = backbone(tokens(1, 9)).last_hidden_state
    assert_close("logits", lm.lm_head(hidden), lm(tokens(1, 9)).logits, 1e-6)


# Importing Trainer imports the registry in the midst of much else, so that registering must not need any of that.
ORDERS = (
    ("import prism, sys; assert 'transformers' not in sys.modules", "from transformers import Trainer"),
    ("import transformers", "import prism, sys; assert 'prism.models' not in sys.modules; prism.models.PrismConfig"),
    ("from transformers import AutoModelForCausalLM", "import prism"),
    ("import prism, importlib.util", "importlib.util.find_spec('transformers.models.auto.configuration_auto')"),
)


def test_auto_classes_know_the_model_after_import_prism(tmp_path: Path) -> None:
    """Each order in a process of its own, forked from one that has imported torch and nothing else of the two."""
    model("prism", torch.float32).save_pretrained(tmp_path)
    load = f"type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__"
    script = "import os, sys, torch._dynamo, torch.distributed.tensor"
    script += "\nassert not {'prism', 'transformers'} & {*sys.modules}"
    for number, imports in enumerate(ORDERS):
        lines = [*imports, "from transformers import AutoModelForCausalLM", f"print({number}, {load})", "sys.exit()"]
        script += "\n    ".join(["\nif os.fork() == 0:", *lines]) + "\nos.wait()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{n} PrismForCausalLM" for n in range(len(ORDERS))], done.stderr


def test_tied_embeddings_are_one_matrix_saved_once(tmp_path: Path) -> None:
    lm = model("prism", tie_word_embeddings=True)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    lm.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved
    again = PrismForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert model("prism").lm_head.weight is not model("prism").model.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_can_grow(tied: bool) -> None:
    lm, ids = model("prism", tie_word_embeddings=tied), tokens(1, 9)
    before = lm(ids).logits
    lm.resize_token_embeddings(70)
    assert lm.config.vocab_size == 70
    assert_close("old tokens", lm(ids).logits[..., : before.shape[-1]], before, 1e-12)
    assert lm(ids + 9).logits.shape == (1, 9, 70)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", rules.names())
def test_gates_stay_in_float32(rule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    lm = PrismForCausalLM(config([rule]))
    exact = {name: gate.detach().clone() for name, gate in gates(lm).items()}
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    started = AutoModelForCausalLM.from_config(config([rule]), dtype=dtype)
    for way, half in {"to": lm.to(dtype), "from_pretrained": loaded, "from_config": started}.items():
        kinds = {name: parameter.dtype for name, parameter in half.named_parameters()}
        assert {name for name, kind in kinds.items() if kind == torch.float32} == exact.keys(), way
        assert half.dtype == dtype
        if way != "from_config":
            assert all(torch.equal(gates(half)[name], exact[name]) for name in exact), way


def _run_half() -> None:
    for layers in STACKS:
        lm, ids = model(layers, torch.bfloat16), tokens(2, 70)
        out = lm(ids[:, :-1])
        step = lm(ids[:, -1:], past_key_values=out.past_key_values)
        assert out.logits.dtype == step.logits.dtype == torch.bfloat16, label(layers)
        assert step.logits.isfinite().all(), label(layers)
        for layer, state in zip(lm.config.layer_plan, step.past_key_values.states, strict=True):
            memories = [x for name, x in state.tensors().items() if name.startswith("memory") and x.is_floating_point()]
            expected = torch.bfloat16 if layer.rule in ("softmax", "sliding_window", "hstu") else torch.float32
            assert all(x.dtype == expected for x in memories), (layer.rule, [x.dtype for x in memories])


def test_half_precision_runs_with_memories_in_float32() -> None:
    """In a separate process: there are CPUs on which torch's bfloat16 products are an illegal instruction."""
    (code,) = finish(start_children(_run_half))
    if code == -signal.SIGILL:
        pytest.skip("this CPU has no bfloat16 products")
    assert code == 0


def test_gates_are_the_parameters_a_rule_owns_itself() -> None:
    lm = PrismForCausalLM(config("prism+mamba2"))
    names = {name.removeprefix("model.layers.") for name in gates(lm)}
    assert names == {
        "0.mixer.rule.decay.A_log",
        "0.mixer.rule.decay.dt_bias",
        "0.mixer.rule.writes.scale",
        "1.mixer.rule.decay.A_log",
        "1.mixer.rule.decay.dt_bias",
        "1.mixer.rule.skip",
    }


@pytest.mark.parametrize("rule", rules.names())
def test_only_matrices_are_decayed(rule: str) -> None:
    lm = PrismForCausalLM(config([rule, rule]))
    spared = no_weight_decay(lm)
    for name, parameter in lm.named_parameters():
        special = name in gates(lm) or name.endswith("bias") or "norm" in name
        assert (name in spared) is special, name
        assert special or parameter.ndim >= 2


@pytest.mark.parametrize("rule", rules.names())
def test_rules_start_as_they_say_and_maps_as_the_configuration_says(rule: str) -> None:
    torch.manual_seed(0)
    lm = PrismForCausalLM(config([rule], hidden_size=64, initializer_range=0.5))
    assert 0.45 < lm.model.embed_tokens.weight.std() < 0.55
    assert 0.45 < lm.model.layers[0].mlp.up.weight.std() < 0.55
    torch.manual_seed(1)
    alone = rules.get(rule).build(64, 2)
    for name, parameter in lm.model.layers[0].mixer.rule.named_parameters():
        expected = dict(alone.named_parameters())[name]
        if name in gates(alone) or "norm" in name:  # drawn or constant: of the same size as in a rule on its own
            assert abs(parameter.mean() - expected.mean()) <= 0.6 * expected.abs().mean() + 1e-6, name


def test_the_bias_of_a_forgetting_gate_survives() -> None:
    """transformers' own initialisation would set it to zero, and every head would forget half at every token."""
    lm = PrismForCausalLM(config("prism", rule_options={"prism": {"preset": "paper"}}))
    alpha = lm.model.layers[0].mixer.rule.alpha.bias.sigmoid()
    assert torch.allclose(alpha, torch.tensor([0.9, 0.999]))


@pytest.mark.parametrize("rule", rules.names())
def test_a_model_from_the_meta_device_starts_like_any_other(rule: str) -> None:
    usual = PrismForCausalLM(config([rule, rule]))
    with torch.device("meta"):
        lm = PrismForCausalLM(config([rule, rule]))
    assert all(parameter.is_meta for parameter in lm.parameters())
    lm.to_empty(device="cpu")
    for started in (usual, lm):
        for parameter in started.parameters():
            parameter.data.fill_(torch.nan)
        for part in started.modules():
            part._is_hf_initialized = False
        torch.manual_seed(0)
        started.init_weights()
    for (name, parameter), other in zip(usual.named_parameters(), lm.parameters(), strict=True):
        assert torch.equal(parameter, other), name  # which also says that none is NaN
        assert parameter.dtype == other.dtype


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config("prism").save_pretrained(tmp_path)
    torch.save({}, tmp_path / name)
    for loader in (AutoModelForCausalLM, PrismForCausalLM):
        with pytest.raises(ValueError, match=rf"{name}.*only safetensors"):
            loader.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only safetensors"):
        PrismForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def test_a_configuration_comes_back_with_its_list_of_layers(tmp_path: Path) -> None:
    layers = ["prism", {"rule": "prism", "steps": 3}, ("softmax", {"kv_heads": 1, "heads": 4})]
    made = config(layers, num_hidden_layers=4)
    made.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is PrismConfig
    assert read.layer_plan == made.layer_plan
    assert [layer.options for layer in read.layer_plan] == [{}, {"steps": 3}, {"kv_heads": 1, "heads": 4}, {}]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "prism"
    stack = PrismForCausalLM(read).model.layers
    assert [layer.mixer.rule.heads for layer in stack] == [2, 2, 4, 2]
    assert [layer.mixer.write_rank for layer in stack] == [2, 3, 1, 2]


def test_configurations_are_equal_if_their_contents_are() -> None:
    assert config("prism") == config("prism")
    assert config("prism") != config("prism", hidden_size=32)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer ≥ 1, got 0"),
        ({"hidden_size": 16.0}, "hidden_size must be an integer ≥ 1, got 16.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer ≥ 1, got 0"),
        ({"layers": "prisma"}, "unknown rule 'prisma' .did you mean 'prism'"),
        ({"layers": "prism*x"}, "'prism\\*x' is not a rule or rule\\*count"),
        ({"rule_options": {"softmax": {}}}, "rule_options names 'softmax', which is not in layers: prism"),
        ({"layers": None}, "layers must be a pattern such as 'prism.3.softmax' or a list of rules, got None"),
        ({"rule_options": 3}, "rule_options must be a dict of options by rule, got 3"),
        ({"dropout": "a"}, "dropout must be at least 0 and less than 1, got 'a'"),
        ({"dropout": math.nan}, "dropout must be at least 0 and less than 1, got nan"),
        ({"norm_eps": -1}, "norm_eps must be a number ≥ 0, got -1"),
        ({"norm_eps": "a"}, "norm_eps must be a number ≥ 0, got 'a'"),
        ({"initializer_range": -1}, "initializer_range must be a number ≥ 0, got -1"),
        ({"rule_options": {"prism": 3}}, "rule_options\\['prism'\\] must be a dict of options, got 3"),
    ],
)
def test_bad_configurations_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PrismConfig(**{"layers": "prism", **settings})


def test_a_wrong_option_is_named_when_the_model_is_built() -> None:
    with pytest.raises(ValueError, match="has no option 'stpes'"):
        PrismForCausalLM(config("prism", rule_options={"prism": {"stpes": 2}}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_not_missing_from_its_own_file(tmp_path: Path, tied: bool) -> None:
    """As transformers' Trainer loads it on resume: what is missing it warns of."""
    first, second = (PrismForCausalLM(config("prism", tie_word_embeddings=tied)) for _ in range(2))
    first.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    assert second.load_state_dict(saved, strict=False).missing_keys == []
    assert torch.equal(second.lm_head.weight, first.lm_head.weight)
    assert (second.lm_head.weight is second.model.embed_tokens.weight) is tied
    saved.pop("lm_head.weight", None)
    assert second.load_state_dict(saved, strict=False).missing_keys == ([] if tied else ["lm_head.weight"])


def test_a_folder_names_its_classes_for_programs_without_prism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained(folder, trust_remote_code=True)` finds them there; with prism imported nothing changes."""
    before = model("prism")
    before.save_pretrained(tmp_path / "saved")
    name_classes(tmp_path / "saved")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "cache")
    named = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    found = [dynamic_module_utils.get_class_from_dynamic_module(name, tmp_path / "saved") for name in named.values()]
    assert found == [PrismConfig, PrismModel, PrismForCausalLM]
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(after) is PrismForCausalLM and fingerprint(after) == fingerprint(before)


def test_without_the_package_a_folder_does_not_advise_the_other_project_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model("prism").save_pretrained(tmp_path / "saved")
    name_classes(tmp_path / "saved")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "cache")
    for absent in ("prism", "prism.models"):
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ImportError, match=r"needs the package prism .*: install prism from its repository"):
        dynamic_module_utils.get_class_from_dynamic_module("modeling_prism.PrismConfig", tmp_path / "saved")


@pytest.mark.parametrize("change", ["a column", "some rows"])
def test_a_change_of_matrices_alone_is_another_model(change: str) -> None:
    lm = model("prism", torch.float32)
    before = fingerprint(lm)
    with torch.no_grad():
        weight = lm.model.embed_tokens.weight if change == "some rows" else lm.model.layers[0].mixer.rule.out.weight
        (weight[1::2] if change == "some rows" else weight[:, 1]).add_(1.0)
    after = fingerprint(lm)
    assert before["maps_sha256"] != after["maps_sha256"]
    assert mismatch(before, after) == "other weights"
    assert mismatch({name: before[name] for name in ("config_sha256", "weights_sha256")}, after) is None  # of users


@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (1024, 1024), (8192, 64), (3, 5)])
def test_the_sample_of_a_matrix_is_spread_over_its_columns(rows: int, columns: int) -> None:
    linear: Any = torch.nn.Linear(columns, rows, bias=False)
    before = maps_sha256(linear)
    with torch.no_grad():
        linear.weight[:, 1:] += 1.0
    assert maps_sha256(linear) != before


def test_weights_by_columns_are_the_same_weights(tmp_path: Path) -> None:
    lm, ids = model("prism+gla", torch.float32), tokens(2, 9)
    before = {name: z.clone() for name, z in lm.state_dict().items()}
    with torch.no_grad():
        expected = lm(ids).logits
        by_columns(lm)
        assert not lm.lm_head.weight.is_contiguous() and lm.lm_head.weight.shape == before["lm_head.weight"].shape
        torch.testing.assert_close(lm(ids).logits, expected)
    lm.save_pretrained(tmp_path)
    again = PrismForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(z, again[name]) for name, z in before.items())
