"""Helpers of the tests of rules: the cases, rules with perturbed weights, and inputs.

There are two sizes. Tests of exact references use the small one: `SMALL_WIDTH`, `small_mixer`, `small_tokens`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prism import Mixer, rules
from prism.rules import Rule
from prism.rules.rule import Span

WIDTH, HEADS = 32, 4
SMALL_WIDTH, SMALL_HEADS = 16, 2

_STACKED = {"layer_index": 2, "layer_count": 4}
_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("prism", {"preset": "paper", "steps": 3}),
    ("prism", {"keys": "previous", "erase": "channel", "residual": "below", "layer_index": 1}),
    ("prism", {"forget": "channel", "steps": 3}),
    ("delta", {"negative_eigenvalues": True}),
    ("delta_product", {"householders": 3, "forget_gate": True, "gate": True, "gate_by": "sigmoid"}),
    ("kda", {"lower_bound": -5.0}),
    ("gdn2", {"negative_eigenvalues": True}),
    ("rwkv7", _STACKED),
    ("linear", {"normalize": True}),
    ("lightning", _STACKED),
    ("mamba2", {"groups": 2, "key_dim": 6}),
    ("mamba3", {"groups": 2, "key_dim": 6, "rotary_fraction": 1.0, "conv_size": 4}),
    ("mamba3", {"key_dim": 6, "trapezoidal": False}),
    ("gla", {"conv_size": 4}),
    ("hgrn2", _STACKED),
    ("rwkv6", _STACKED),
    ("softmax", {"qk_norm": True, "gate": True, "rope_dims": 4, "kv_heads": 2}),
]

CASES = [
    pytest.param(name, options, id="-".join([name, *map(str, options)]))
    for name, options in [*((name, {}) for name in rules.names()), *_VARIANTS]
]


def perturbed_mixer(
    name: str, dtype: torch.dtype = torch.float32, width: int = WIDTH, heads: int = HEADS, **options: Any
) -> Mixer:
    """A mixer whose parameters have all moved off their initial values, so that no zero hides a path."""
    mixer = Mixer(name, width, heads, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer.to(dtype)


def perturbed_rule(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Rule:
    return perturbed_mixer(name, dtype, **options).rule


def small_mixer(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Mixer:
    """A small perturbed mixer, in float64 and without gradients."""
    return perturbed_mixer(name, dtype, SMALL_WIDTH, SMALL_HEADS, **options).requires_grad_(False)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def small_tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, SMALL_WIDTH, dtype=dtype)


def first_update(rule: Rule, x: Tensor) -> Any:
    """The rule's update at the start of a sequence."""
    return update_and_extra(rule, x)[0]


def update_and_extra(rule: Rule, x: Tensor) -> tuple[Any, Any]:
    """The rule's update at the start of a sequence, and what it keeps for its output."""
    update, _, extra = rule.update(x, {}, Span())
    return update, extra
