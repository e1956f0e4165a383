"""Adapters as peft handles them: saving, LoRA in the same model, merging, deleting, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from prism.hf.adapters import PrismAdapterConfig
from prism.models import PrismConfig, PrismForCausalLM
from tests.hf.adapters.bases import adapted, base, close, logits, perturb, tokens

SOME = ("gated_delta", "qwen3_next")
MAPS = {"gated_delta": ["qkv", "down"], "qwen3_next": ["in_proj_qkvz", "q_proj"]}


def with_lora(family: str, lora: PeftConfig | None = None) -> PeftModel:
    """A base with LoRA on some maps, inside the adapted layers and outside."""
    return get_peft_model(base(family), lora or LoraConfig(r=2, target_modules=MAPS[family]), adapter_name="maps")  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("family", SOME)
def test_lora_at_the_same_time(family: str, tmp_path: Path) -> None:
    ids = tokens()
    model = get_peft_model(with_lora(family), PrismAdapterConfig(rank=4), adapter_name="writes").eval()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {kind for name in trained for kind in ("lora_", "prism_branches") if kind in name} == {
        "lora_",
        "prism_branches",
    }
    assert all("lora_" in name or "prism_branches" in name for name in trained)
    assert torch.equal(logits(model, ids), logits(base(family), ids))
    with torch.no_grad():
        for i, p in enumerate(trained.values()):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    whole = logits(model, ids)
    if family == "gated_delta":  # with weights this large, rounding in float32 depends on the processor
        model.double()
        assert close(logits(model, ids, (6, 7, 8)), logits(model, ids), 1e-10)
        model.float()
    else:  # transformers' experts have no float64
        assert close(logits(model, ids, (6, 7, 8)), whole)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), logits(base(family), ids))
    model.save_pretrained(tmp_path)
    inner = with_lora(family, PeftConfig.from_pretrained(tmp_path / "maps"))
    again = PeftModel.from_pretrained(inner, tmp_path / "writes", adapter_name="writes")
    again.load_adapter(tmp_path / "maps", adapter_name="maps")
    assert torch.equal(logits(again.eval(), ids), whole)
    alone = PeftModel.from_pretrained(base(family), tmp_path / "writes")  # without LoRA, under another name
    found = [p for name, p in alone.named_parameters() if "prism_branches" in name]
    wanted = [p for name, p in trained.items() if "prism_branches" in name]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", SOME)
def test_a_saved_adapter_can_get_another_name(family: str, tmp_path: Path) -> None:
    ids, model = tokens(), perturb(adapted(family))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(family), tmp_path, adapter_name="other", low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(again, ids), logits(model, ids))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all("prism_branches.writes." in name for name in saved)
    again.load_adapter(tmp_path, adapter_name="third")
    again.delete_adapter("other")
    again.set_adapter("third")
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("family", SOME)
def test_merging_is_refused_and_unloading_gives_the_base(family: str) -> None:
    ids, model = tokens(), perturb(adapted(family))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match=r"cannot be merged: its writes have keys and values of their own"):
            merge()
    plain = model.unload()
    assert type(plain) is type(base(family))
    assert not any("prism_branches" in name for name in plain.state_dict())
    assert torch.equal(logits(plain, ids), logits(base(family), ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be an integer ≥ 1, got 0"),
        ({"rank": 25}, "rank must be from 1 to 24, the smallest size of the adapted layers, got 25"),
        ({"steps": 1}, "steps must be an integer ≥ 2, got 1"),
        ({"keys": "previous"}, "keys must be one of own, orthogonal, rotated, shared, got 'previous'"),
        ({"scaling": "fixed"}, "scaling must be one of channel, head, got 'fixed'"),
        ({"layers": [1]}, "layers must be among the Gated DeltaNet layers 0, 2, got 1"),
        ({"layers": []}, "layers must be numbers ≥ 0"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapted("gated_delta", **options)


@pytest.mark.parametrize("rule", ["softmax", "delta", "prism"])  # the default prism has two writes already
def test_a_base_without_such_layers_is_refused(rule: str) -> None:
    plain = PrismForCausalLM(PrismConfig(50, 32, num_heads=2, layers=rule))
    with pytest.raises(ValueError, match="PrismForCausalLM has no layer that a PRISM adapter can extend"):
        get_peft_model(plain, PrismAdapterConfig(rank=4))


@pytest.mark.parametrize("other", [{"hidden_size": 48}, {"num_heads": 4}, {"layers": ["gated_delta", "gated_delta"]}])
def test_an_adapter_for_another_base_is_refused(other: dict[str, Any], tmp_path: Path) -> None:
    adapted("gated_delta").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"made for another base \(prism, layers 0, 2, width 32, 2 heads of 12 × 24\)"):
        PeftModel.from_pretrained(base("gated_delta", **other), tmp_path)
    with pytest.raises(ValueError, match="made for another base"):
        PeftModel.from_pretrained(base("qwen3_next"), tmp_path)


def test_some_layers_alone_are_adapted() -> None:
    model = adapted("qwen3_next", layers=[2])
    assert {name.split("layers.")[1][0] for name, p in model.named_parameters() if p.requires_grad} == {"2"}


def test_the_configuration_is_plain_json(tmp_path: Path) -> None:
    model = adapted("qwen3_next", steps=3)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["peft_type"] == "PRISM" and saved["steps"] == 3 and saved["base"]["model_type"] == "qwen3_next"
    assert PeftConfig.from_pretrained(tmp_path).base == model.peft_config["default"].base


def test_accelerate_prepares_an_adapted_model() -> None:
    from accelerate import Accelerator

    accelerator, model, ids = Accelerator(cpu=True), adapted("qwen3_next").train(), tokens()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_peft_is_optional() -> None:
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'peft': raise ModuleNotFoundError('no', name='peft')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import prism\n"
        "try:\n"
        "    import prism.hf.adapters\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'prism.hf.adapters needs peft, from the extra adapters: pip install ".[adapters]"' in done.stdout
