"""RWKV-6 and RWKV-7 by their published equations, token by token, their initial weights and their shared value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from prism import rules
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.rules.rule_cases import HEADS, WIDTH, first_update, perturbed_mixer, perturbed_rule, tokens


def _before(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def test_rwkv6_by_its_equations() -> None:
    """Token by token, from the published formulas and the layer's parameters."""
    rule: Any = perturbed_rule("rwkv6", torch.float64, layer_index=1, layer_count=3)
    x = tokens(2, 11)
    back = _before(x) - x
    hidden = torch.tanh((x + back * rule.mix.first) @ rule.mix.down.weight.T).unflatten(-1, (5, 32))
    xr, xw, xk, xv, xg = (x + back * (rule.mix.mu[i] + hidden[..., i, :] @ rule.mix.up[i]) for i in range(5))
    r, k, v, g = (
        xr @ rule.receptance.weight.T,
        xk @ rule.key.weight.T,
        xv @ rule.value.weight.T,
        xg @ rule.gate.weight.T,
    )
    low = torch.tanh(xw @ rule.decay_in.down.weight.T) @ rule.decay_in.up.weight.T
    decay = torch.exp(-torch.exp(rule.decay_in.up.bias + low))
    S = torch.zeros(2, HEADS, 8, 8, dtype=torch.float64)  # value-first, as published
    outputs = []
    for t in range(11):
        rt, kt, vt, wt = (z[:, t].view(2, HEADS, 8) for z in (r, k, v, decay))
        own = torch.einsum("bhv,bhk->bhvk", vt, rule.bonus * kt)
        outputs.append(torch.einsum("bhvk,bhk->bhv", S + own, rt))
        S = S * wt.unsqueeze(-2) + torch.einsum("bhv,bhk->bhvk", vt, kt)
    o = torch.stack(outputs, 1).flatten(-2)
    o = F.group_norm(o.flatten(0, 1), HEADS, rule.norm.norm.weight, rule.norm.norm.bias, 64e-5).view_as(o)
    expected = (o * F.silu(g)) @ rule.out.weight.T
    assert_close("layer", _alone(rule, x), expected, 1e-12)


@pytest.mark.parametrize("layer", [0, 1])
def test_rwkv7_by_its_equations(layer: int) -> None:
    rule: Any = perturbed_rule("rwkv7", torch.float64, layer_index=layer, layer_count=3)
    x, first = tokens(2, 11), tokens(2, 11)

    def low(maps: Any, z: Tensor, activation: Any = lambda h: h) -> Tensor:
        bias = 0.0 if maps.up.bias is None else maps.up.bias
        return bias + activation(z @ maps.down.weight.T) @ maps.up.weight.T

    back = _before(x) - x
    xr, xw, xk, xv, xa, xg = (x + back * mu for mu in rule.mix.mu)
    r, k, v = xr @ rule.receptance.weight.T, xk @ rule.key.weight.T, xv @ rule.value.weight.T
    if layer:
        v = v + (first - v) * low(rule.value_mix, xv).sigmoid()
    a = low(rule.rate, xa).sigmoid()
    decay = torch.exp(-math.exp(-0.5) * low(rule.decay_in, xw, torch.tanh).sigmoid())
    kappa = (k * rule.erase_scale).view(2, 11, HEADS, 8)
    kappa = kappa / (kappa.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    written = k * (1 + (a - 1) * rule.rate_scale)
    S = torch.zeros(2, HEADS, 8, 8, dtype=torch.float64)  # value-first, as published
    outputs = []
    for t in range(11):
        rt, kt, vt, at, wt = (z[:, t].view(2, HEADS, 8) for z in (r, written, v, a, decay))
        transition = torch.diag_embed(wt) - torch.einsum("bhi,bhj->bhij", kappa[:, t], at * kappa[:, t])
        S = S @ transition + torch.einsum("bhv,bhk->bhvk", vt, kt)
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, rt))
    o = torch.stack(outputs, 1).flatten(-2)
    o = F.group_norm(o.flatten(0, 1), HEADS, rule.norm.norm.weight, rule.norm.norm.bias, 64e-5).view_as(o)
    alignment = (r * written).view(2, 11, HEADS, 8) * rule.bonus
    o = o + (alignment.sum(-1, keepdim=True) * v.view(2, 11, HEADS, 8)).flatten(-2)
    expected = (o * low(rule.gate, xg, torch.sigmoid)) @ rule.out.weight.T
    shared = {"value": first} if layer else {}
    assert_close("layer", _alone(rule, x, shared), expected, 1e-12)
    if layer == 0:
        assert_close("the value left for the layers above", shared["value"], v, 1e-12)


def _alone(rule: Any, x: Tensor, shared: dict[str, Tensor] | None = None) -> Tensor:
    update, _, extra = rule.update(x, {}, Span(shared=shared))
    return rule.output(prism.memory(update)[0], x, extra)


def test_rwkv7_starts_as_published() -> None:
    rule: Any = rules.get("rwkv7").build(WIDTH, HEADS, layer_index=1, layer_count=4)
    assert torch.count_nonzero(rule.out.weight) == 0
    assert_close("k_k", rule.erase_scale, 0.71 - 0.1 * torch.linspace(-0.5, 0.5, WIDTH), 1e-6)
    assert rule.rate_scale.tolist() == pytest.approx([1.02] * WIDTH)
    assert rule.bonus.flatten().tolist() == pytest.approx([-0.04] * WIDTH)
    g = first_update(rule, torch.randn(1, 3, WIDTH)).log_decay
    assert -math.exp(-0.5) < g.min() and g.max() < 0
    assert_close("decays do not depend on the input yet", g[:, 0], g[:, 2], 1e-6)


def test_rwkv6_starts_as_published() -> None:
    rule: Any = rules.get("rwkv6").build(WIDTH, HEADS, layer_index=3, layer_count=4)
    channel = torch.arange(WIDTH) / (WIDTH - 1)
    g = first_update(rule, torch.randn(1, 1, WIDTH)).log_decay
    assert_close("decay", g.flatten(), -torch.exp(-6 + 5 * channel**2.0), 1e-5)
    assert_close(
        "bonus of the first three", rule.bonus.flatten()[:3], 1 - channel[:3] + torch.tensor([0, 0.1, -0.1]), 1e-5
    )


@pytest.mark.parametrize(
    ("name", "powers"), [("rwkv6", [0.5, 1, 1, 1, 0.5]), ("rwkv7", [0.2, 0.9, 0.7, 0.7, 0.9, 0.2])]
)
def test_mixtures_and_norms_start_by_depth(name: str, powers: list[float]) -> None:
    """At layer 1 of 4: channel 8 of 32 looks back by 1 - .25^{p·¾}, and RWKV-6's value by .3·⅓ less."""
    rule: Any = rules.get(name).build(WIDTH, HEADS, layer_index=1, layer_count=4)
    expected = torch.tensor([1 - 0.25 ** (0.75 * p) for p in powers])
    if name == "rwkv6":
        expected[3] -= 0.1
    assert_close("μ", rule.mix.mu[:, 8], expected, 1e-6)
    assert rule.norm.norm.weight.tolist() == pytest.approx([0.5**0.7] * WIDTH)


def test_rwkv7_low_rank_maps_start_constant_and_small() -> None:
    rule: Any = rules.get("rwkv7").build(256, 4, layer_index=1, layer_count=4)
    for maps, rank in ((rule.decay_in, 32), (rule.rate, 32), (rule.value_mix, 32), (rule.gate, 64)):
        assert torch.count_nonzero(maps.down.weight) == 0
        gram = maps.up.weight.T @ maps.up.weight
        assert_close("a tenth of an orthogonal map", gram, 0.01 * torch.eye(rank), 1e-5)


def test_rwkv7_without_a_first_value_uses_its_own() -> None:
    mixer = perturbed_mixer("rwkv7", torch.float64, layer_index=1, layer_count=2)
    x = tokens(2, 5)
    alone, _ = mixer(x)
    shared = {"value": mixer.rule._value(mixer.rule.mix(x, _before(x))[3], None)}
    assert_close("own value", mixer(x, shared=shared)[0], alone, 1e-12)
    assert not torch.allclose(mixer(x, shared={"value": tokens(2, 5)})[0], alone)
    with pytest.raises(ValueError, match=r"shared\['value'\] has shape \[2, 4, 32\]"):
        mixer(x, shared={"value": tokens(2, 4)})


def test_read_before_write_is_what_makes_rwkv6() -> None:
    """Without decay, reading S_{t-1} and adding the token with u = 1 is reading S_t."""
    rule: Any = perturbed_rule("rwkv6", torch.float64)
    update, _, own = rule.update(tokens(2, 9), {}, Span())
    undecayed = replace(update, log_decay=None, read="after")
    before = replace(update, log_decay=None)
    ones = torch.ones(HEADS, rule.key_dim, dtype=torch.float64)
    o = prism.memory(before)[0] + own.bonus(ones)
    assert_close("outputs", o, prism.memory(undecayed)[0], 1e-12)
