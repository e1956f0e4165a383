"""The rules under test: every one that is registered, and variants whose options change the equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prism import Mixer, Update, rules
from prism.rules import Rule
from prism.rules.rule import Span

WIDTH, HEADS = 32, 4

_STACKED = {"layer_index": 2, "layer_count": 4}
_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("prism", {"preset": "paper", "steps": 3}),
    ("delta", {"negative_eigenvalues": True}),
    ("delta_product", {"householders": 3, "forget_gate": True, "gate": True}),
    ("kda", {"lower_bound": -5.0}),
    ("rwkv7", _STACKED),
    ("linear", {"normalize": True}),
    ("lightning", _STACKED),
    ("mamba2", {"groups": 2, "key_dim": 6}),
    ("gla", {"conv_size": 4}),
    ("hgrn2", _STACKED),
    ("rwkv6", _STACKED),
]

CASES = [
    pytest.param(name, options, id="-".join([name, *map(str, options)]))
    for name, options in [*((name, {}) for name in rules.names()), *_VARIANTS]
]


def stirred(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Rule:
    """A rule whose parameters have all moved off their starting values, so that no zero hides a path."""
    return stirred_mixer(name, dtype, **options).rule


def stirred_mixer(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Mixer:
    mixer = Mixer(name, WIDTH, HEADS, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer.to(dtype)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def told(rule: Rule, x: Tensor) -> Update:
    """What the rule tells its memory at the start of a sequence."""
    update: Update = rule.update(x, {}, Span())[0]
    return update
