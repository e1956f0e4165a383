"""LoRA on our models: default target modules of peft, for every rule, and maps that all take part."""

from __future__ import annotations

import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from prism import autoload, rules
from prism.models import PrismConfig, PrismForCausalLM


def test_every_rule_has_default_targets_and_all_take_part() -> None:
    """One layer per rule: the maps of each, and its SwiGLU, get a gradient, whichever fused path a layer takes."""
    torch.manual_seed(0)
    names = rules.names()
    layers = {"vocab_size": 16, "hidden_size": 16, "num_heads": 2, "layers": "+".join(names)}
    base = PrismForCausalLM(PrismConfig(**layers, num_hidden_layers=len(names)))
    for part in base.modules():
        if isinstance(part, nn.Linear):  # some outputs start at 0, and nothing before them would get a gradient
            nn.init.normal_(part.weight, std=0.2)
    model = get_peft_model(base, LoraConfig(r=2))
    tokens = torch.randint(16, (2, 6))
    model(input_ids=tokens, labels=tokens).loss.backward()
    for number, rule in enumerate(names):
        place = f"base_model.model.model.layers.{number}."
        adapted = {
            name.removeprefix(place)
            for name, part in model.named_modules()
            if hasattr(part, "lora_A") and place in name
        }
        assert {"mlp.gate", "mlp.up", "mlp.down"} < adapted, rule
        assert adapted & {"mixer.rule.out", "mixer.rule.inner.out"}, rule
        idle = [
            name
            for name, p in model.named_parameters()
            if place in name and "lora_B" in name and (p.grad is None or not bool(p.grad.any()))
        ]
        # The experts of a mixture see the tokens that are routed to them, which may be none.
        assert not [name for name in idle if ".maps." not in name], rule
    assert not [name for name, part in model.named_modules() if hasattr(part, "lora_A") and "layers." not in name]


def test_a_table_is_extended_when_it_is_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_table.py").write_text("TABLE = {'llama': ['q_proj']}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(autoload, "LORA", "late_table")
    monkeypatch.setattr(autoload, "LORA_TABLE", "TABLE")
    for _ in range(2):
        autoload.register_with_transformers()
    hooks = [finder for finder in sys.meta_path if isinstance(finder, autoload._AfterImport)]
    assert [hook.module for hook in hooks] == ["late_table"]
    table = import_module("late_table").TABLE
    assert table == {"llama": ["q_proj"], "prism": autoload.LORA_TARGETS}
    assert hooks[0] not in sys.meta_path


def test_another_peft_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, autoload.LORA, types.ModuleType("constants"))
    with pytest.warns(UserWarning, match="pass target_modules"):
        autoload._register_lora()
