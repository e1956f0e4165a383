"""Whole layers of Hebbian rules against their published formulas: a plain loop, every norm and gate written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import assert_close
from tests.rules.rule_cases import HEADS, WIDTH, perturbed_mixer, tokens

TOKENS = 9


def loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """`[B, T, H, K]`, `[B, T, H, V]`, decay `[…, H, K or 1]` → `[B, T, H, V]`; the state is value-first, as papers write it."""
    decay = decay.expand(*k.shape[:3], -1)
    S = torch.zeros(*v.shape[:1], *v.shape[2:], k.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[1]):
        S = S * decay[:, t].unsqueeze(-2) + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1)


def rms(o: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def turn(z: Tensor, exponents: Tensor) -> Tensor:
    """Neighbouring channels are a complex number, turned by position · 10000^-exponent."""
    angle = torch.arange(z.shape[1])[:, None, None] * 10000.0**-exponents
    turned = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def _linear(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = loop((F.elu(q) + 1) * rule.key_dim**-0.5, F.elu(k) + 1, v, torch.ones(HEADS, 1))
    return rms(o, rule.norm.norm.weight).flatten(-2)


def _retnet(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exponents = torch.linspace(0, 1, rule.key_dim // 2, dtype=torch.float64)
    decay = torch.tensor([[1 - 2.0 ** (-5 - h)] for h in range(HEADS)], dtype=torch.float64)
    o = loop(turn(q, exponents), turn(k, exponents) * rule.key_dim**-0.5, v, decay)
    return rms(o).flatten(-2) * F.silu(rule.gate(x))


def _gated_retention(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exponents = torch.arange(0, rule.key_dim, 2, dtype=torch.float64) / rule.key_dim
    decay = rule.decay_in(x).sigmoid().unsqueeze(-1) ** (1 / 16)
    o = loop(turn(q, exponents), turn(k, exponents) * rule.key_dim**-0.5, v, decay)
    return rms(o).flatten(-2) * F.silu(rule.gate(x))


def _lightning(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.tensor([[2.0 ** (-8 * (h + 1) / HEADS)] for h in range(HEADS)], dtype=torch.float64)
    o = loop(F.silu(q), F.silu(k), F.silu(v), torch.exp(-(1 + 1e-5) * slopes))
    return rms(o.flatten(-2), rule.norm.norm.weight) * rule.gate(x).sigmoid()


def _gla(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    decay = rule.decay_in(x).sigmoid().unflatten(-1, (HEADS, -1)) ** (1 / 16)
    o = loop(q * rule.key_dim**-0.5, k, v, decay)
    return rms(o, rule.norm.norm.weight).flatten(-2) * F.silu(rule.gate(x))


def _hgrn2(rule: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    forget = k.sigmoid()  # the first layer has no lower bound
    o = loop(F.silu(q) * rule.key_dim**-0.5, 1 - forget, v, forget)
    return rms(o.flatten(-2), rule.norm.norm.weight)


LAYERS = {
    "linear": _linear,
    "retnet": _retnet,
    "gated_retention": _gated_retention,
    "lightning": _lightning,
    "gla": _gla,
    "hgrn2": _hgrn2,
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_its_formula(name: str) -> None:
    mixer = perturbed_mixer(name, torch.float64, key_dim=6, value_dim=5)
    rule: Any = mixer.rule
    x = tokens(2, TOKENS)
    q, k, v = (
        z.unflatten(-1, (HEADS, -1)) for z in (x @ rule.qkv.weight.T).split([6 * HEADS, 6 * HEADS, 5 * HEADS], -1)
    )
    expected = LAYERS[name](rule, x, q, k, v) @ rule.out.weight.T
    assert expected.shape == (2, TOKENS, WIDTH)
    assert_close(name, mixer(x)[0], expected, 1e-10)
