"""Qwen3-Next and Qwen3.5 become ours with the same logits; their relatives are refused with a reason."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism.models import PrismForCausalLM, convert_model
from tests.helpers import assert_close

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}


def theirs(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A saved model of transformers with large random weights, that runs on a CPU also where fla is installed."""
    if family == "qwen3_next":
        from transformers import Qwen3NextConfig as Config
        from transformers import Qwen3NextForCausalLM as Model
        from transformers.models.qwen3_next import modeling_qwen3_next as module

        changes = {"num_experts": 0, **changes}
    else:
        pytest.importorskip("transformers.models.qwen3_5", reason="this transformers is older than Qwen3.5")
        from transformers import Qwen3_5ForCausalLM as Model
        from transformers import Qwen3_5TextConfig as Config
        from transformers.models.qwen3_5 import modeling_qwen3_5 as module
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    torch.manual_seed(0)
    model = Model(Config(**{**SIZES, **changes})).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "linear_num_value_heads": 2}])
@torch.no_grad()
def test_the_logits_are_the_same(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = theirs(family, tmp_path / "theirs", monkeypatch, **changes)
    ids = torch.randint(40, (2, 11), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"rule": "prism"}):
        folder = convert_model(tmp_path / "theirs", tmp_path / "ours", force=True, **options)
        own = PrismForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert_close("logits", own(ids).logits, model(ids).logits, 1e-5)


@torch.no_grad()
def test_the_language_model_of_a_model_that_sees_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen3.5 is published: the tensors have another stem, and there are tensors that take no part."""
    model = theirs("qwen3_5_text", tmp_path / "text", monkeypatch)
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    tensors |= {"model.visual.patch_embed.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    folder = convert_model(tmp_path / "whole", tmp_path / "ours")
    ids = torch.arange(7)[None]
    own = PrismForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_close("logits", own(ids).logits, model(ids).logits, 1e-5)


def test_norms_of_a_model_in_bfloat16_keep_their_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs("qwen3_5_text", tmp_path / "theirs", monkeypatch).bfloat16().save_pretrained(tmp_path / "half")
    convert_model(tmp_path / "half", tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "ours"))
    assert torch.equal(after["model.norm.weight"], 1 + before["model.norm.weight"].float())
    assert after["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_experts": 4}, "num_experts is 4 in its config.json, but our layers have no experts"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types is 'chunked_attention'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3.*not a multiple of linear_num_key_heads \\(2\\)"),
        ({"model_type": "olmo_hybrid"}, "'olmo_hybrid' cannot be converted: its attention layers normalise"),
        ({"model_type": "qwen3_5_moe"}, "'qwen3_5_moe' cannot be converted: its layers have experts"),
    ],
)
def test_what_has_no_counterpart_is_named(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    config = {"model_type": "qwen3_next", **SIZES, **change}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.ones(1)}, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        convert_model(tmp_path / "theirs", tmp_path / "ours")


def test_layers_with_experts_only_where_there_are_none_are_fine(tmp_path: Path) -> None:
    from prism.models.convert.qwen import config_from

    given = {"model_type": "qwen3_next", **SIZES, "num_experts": 4, "mlp_only_layers": [0, 1, 2, 3]}
    assert config_from(given, "gated_delta", {}).num_hidden_layers == 4
