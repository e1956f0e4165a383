"""Pointwise attention against its formula, written out; that it streams and packs is shown with every other rule's tests."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism import Mixer, memory
from prism.engine.memories.pointwise import DISTANCES, NEAR, Pointwise, distance_entry
from prism.rules.rule import Span

B, H, K, V = 2, 2, 4, 3


def update(tokens: int, seed: int = 0, mask: Tensor | None = None, reset: Tensor | None = None) -> Pointwise:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, tokens, H, size, dtype=torch.float64, requires_grad=True) for size in (K, K, V))
    bias = torch.randn(H, DISTANCES, dtype=torch.float64, requires_grad=True)
    return Pointwise(q, k, v, None, reset, mask, bias)


def test_the_formula() -> None:
    u = update(7)
    o, _ = memory(u)
    assert u.bias is not None
    for t in range(7):
        scores = torch.stack([(u.q[:, t] * u.k[:, j]).sum(-1) * K**-0.5 + u.bias[:, t - j] for j in range(t + 1)], -1)
        expected = torch.einsum("bhj,bjhv->bhv", F.silu(scores), u.v[:, : t + 1]) / (t + 1)
        torch.testing.assert_close(o[:, t], expected)


def test_both_forms_agree_over_blocks_of_queries_and_segments() -> None:
    reset = torch.zeros(B, 300, dtype=torch.bool)
    reset[0, 40] = reset[1, 290] = True
    mask = torch.ones(B, 300, dtype=torch.bool)
    mask[1, 295:] = False
    u = update(300, mask=mask, reset=reset)
    inputs = (u.q, u.k, u.v, u.bias)
    o, state = memory(u)
    expected, final = memory(u, form="recurrent")
    torch.testing.assert_close(o, expected)
    assert {name: x.shape for name, x in state.items()} == {name: x.shape for name, x in final.items()}
    torch.testing.assert_close(state, final)
    weight = torch.randn_like(o)
    got, wanted = (torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (o, expected))
    torch.testing.assert_close(got, wanted)


def test_distances_near_have_their_own_bias_and_far_ones_share() -> None:
    entries = distance_entry(torch.arange(300_000))
    assert entries[:NEAR].tolist() == list(range(NEAR))
    assert bool((entries.diff() >= 0).all()) and bool((entries.diff() <= 1).all())
    assert int(entries[2**17 - 1]) == int(entries[-1]) == DISTANCES - 1
    assert int(entries[64]) - int(entries[32]) == 8


def test_the_gate_silences_and_the_norm_forgets_the_scale() -> None:
    torch.manual_seed(1)
    mixer = Mixer("hstu", 8, 2, key_dim=4, value_dim=6)
    x = torch.randn(1, 5, 8)
    expected, state = mixer(x)
    assert state.memory["v"].shape == (1, 5, 2, 6)
    rule = mixer.rule
    u = F.silu(rule.uvqk(x))[..., :12]
    o, _ = memory(rule.update(x, {}, Span())[0])
    flat = o.flatten(-2)
    normed = flat * (flat.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * rule.norm.norm.weight
    torch.testing.assert_close(rule.out(normed * u), expected)


def test_bad_input_is_named() -> None:
    u = update(3)
    with pytest.raises(ValueError, match="window must be None"):
        Pointwise(u.q, u.k, u.v, 4)
    with pytest.raises(ValueError, match=r"bias has shape \[2, 5\]"):
        Pointwise(u.q, u.k, u.v, bias=torch.zeros(2, 5))
