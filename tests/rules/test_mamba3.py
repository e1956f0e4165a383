"""Mamba-3 by its equations: a rotating state, token by token, from the layer's input to its output."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

from prism import Mixer, rules
from prism.rules.parts.angles import running_angle, wrapped
from prism.rules.rule import Span
from tests.helpers import assert_close, examples
from tests.rules.rule_cases import small_mixer, small_tokens

OPTIONS: list[dict[str, Any]] = [
    {"key_dim": 8},
    {"key_dim": 6, "groups": 2, "rotary_fraction": 1.0, "value_dim": 3},
    {"key_dim": 8, "trapezoidal": False},
    {"key_dim": 5, "bc_norm": False, "bc_bias": False, "rotary_fraction": 0.4},
    {"key_dim": 4, "rotary_fraction": 0.0},
]


def normalised(z: Tensor, norm: Any) -> Tensor:
    return z if norm is None else z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def turned(angle: Tensor, size: int) -> Tensor:
    """The matrix `[size, size]` that turns channels i and i + pairs by these angles `[pairs]`, and leaves the others."""
    cos, sin = angle.cos().diag(), angle.sin().diag()
    turn = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
    return torch.block_diag(turn, torch.eye(size - 2 * len(angle), dtype=angle.dtype))


def by_equations(rule: Any, x: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """One row's outputs `[T, width]` and final states `[H, K, V]`; `starts`: where documents start."""
    T, H, K, V = len(x), rule.heads, rule.key_dim, rule.value_dim
    C, B, v = (x @ part.T for part in rule.qkv.weight.split(rule.sizes))
    C, B = (normalised(z.view(T, rule.groups, K), n) for z, n in ((C, rule.query_norm), (B, rule.key_norm)))
    v = v.view(T, H, V)
    step, rate = F.softplus(x @ rule.step_in.weight.T + rule.dt_bias), F.softplus(x @ rule.rate_in.weight.T)
    blend = torch.ones_like(step) if rule.blend_in is None else (x @ rule.blend_in.weight.T).sigmoid()
    theta = x[:, :0] if rule.angle_in is None else (x @ rule.angle_in.weight.T).tanh()
    answers, states = [], []
    for h in range(H):
        group = h // (H // rule.groups)
        b, c = (
            z[:, group] + (0 if bias is None else bias[h]) for z, bias in ((B, rule.key_bias), (C, rule.query_bias))
        )
        S, rows = torch.zeros(K, V, dtype=x.dtype), []
        for t in range(T):
            if t in starts:
                S = torch.zeros_like(S)
            delta, share = step[t, h], blend[t, h]
            alpha, R = (-delta * rate[t, h]).exp(), turned(delta * math.pi * theta[t], K).T
            S_next = alpha * R @ S + share * delta * torch.outer(b[t], v[t, h])
            if t > 0 and t not in starts:
                S_next = S_next + alpha * (1 - share) * delta * R @ torch.outer(b[t - 1], v[t - 1, h])
            S = S_next
            rows.append(S.T @ c[t] + rule.skip[h] * v[t, h])
        answers.append(torch.stack(rows))
        states.append(S)
    y = torch.stack(answers, 1).flatten(1) * F.silu(x @ rule.gate.weight.T)
    return y @ rule.out.weight.T, torch.stack(states)


@pytest.mark.parametrize("starts", [[], [0, 4, 5]], ids=["one document", "packed documents"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_the_layer_by_its_equations(options: dict[str, Any], starts: list[int]) -> None:
    mixer = small_mixer("mamba3", **options)
    rule: Any = mixer.rule
    with torch.no_grad():
        rule.dt_bias += 3  # turns of up to 3π, and a strong decay
    x = small_tokens(2, 9)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[:, starts] = True
    y, state = mixer(x, reset=reset if starts else None)
    for row in range(2):
        expected, S = by_equations(rule, x[row], starts)
        assert_close("outputs", y[row], expected, 1e-12)
        for h in range(rule.heads):  # the memory is the state before its rotations
            angle = state.carry["angle"][row, h] if rule.angle_in is not None else x[0, 0, :0]
            assert_close("state", state.memory[row, h], turned(angle, rule.key_dim) @ S[h], 1e-12)


def test_without_its_additions_it_is_mamba2_without_a_convolution() -> None:
    off = {"trapezoidal": False, "rotary_fraction": 0.0, "bc_norm": False, "bc_bias": False}
    new: Any = small_mixer("mamba3", key_dim=6, **off).rule
    old: Any = small_mixer("mamba2", key_dim=6, conv_size=1).rule
    with torch.no_grad():
        old.qkv.weight.copy_(new.qkv.weight)
        old.conv.activation, old.conv.bias = False, None
        old.decay_in.weight.copy_(new.step_in.weight)
        old.decay.dt_bias.copy_(new.dt_bias)
        new.rate_in.weight.zero_()
        old.decay.A_log.fill_(math.log(math.log(2.0)))  # softplus(0)
    x = small_tokens(2, 7)
    (got, _, _), (wanted, _, _) = new.update(x, {}, Span()), old.update(x, {}, Span())
    for name in ("q", "k", "w", "log_decay"):
        assert_close(name, getattr(got, name), getattr(wanted, name), 1e-14)


def test_it_starts_as_published() -> None:
    rule: Any = rules.get("mamba3").build(64, 16)
    step = F.softplus(rule.dt_bias)
    assert step.min() >= 1e-3 * (1 - 1e-4) and step.max() <= 1e-1 * (1 + 1e-4) and step.max() > 3 * step.min()
    for ones in (rule.key_bias, rule.query_bias, rule.skip, rule.key_norm.weight):
        assert torch.equal(ones, torch.ones_like(ones))
    assert rule.angle_in.out_features == 32 and rule.conv.weight is None
    assert not Mixer("mamba3", 16, 2)(torch.randn(1, 3, 16))[1].carry.keys() - {"angle", "token"}


def test_the_slowest_decay_is_bounded() -> None:
    rule: Any = rules.get("mamba3").build(16, 2, key_dim=4)
    with torch.no_grad():
        rule.rate_in.weight.fill_(-1.0)
        step, log_decay, _, _ = rule.controls(torch.full((1, 1, 16), 10.0))
    assert_close("decay", log_decay / step, torch.full_like(step, -1e-4), 1e-6)


@examples(25)
@given(st.data())
def test_angles_add_up_within_documents(data: st.DataObject) -> None:
    """Against a loop over tokens, cut into two calls, with padding at the end of rows."""
    T = data.draw(st.sampled_from([1, 2, 5, 64, 65, 150]))
    turn = torch.randn(2, T, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
    starts = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, T - 1)), max_size=4))
    lengths = torch.tensor([T, data.draw(st.integers(0, T))])
    reset = torch.zeros(2, T, dtype=torch.bool)
    for row, t in starts:
        reset[row, t] = True
    mask = torch.arange(T) < lengths[:, None]
    reset &= mask
    first = torch.full((2, 1, 3), 1.5, dtype=torch.float64)
    expected, end = [first], first
    for t in range(T):
        flag = reset[:, t, None, None]
        expected.append(torch.where(flag, 0.0, expected[-1]) + turn[:, t])
        end = torch.where(mask[:, t, None, None], expected[-1], end)
    cut = data.draw(st.integers(0, T - 1))
    angle, carried, found = first, first, []
    for part in (slice(0, cut), slice(cut, T)):
        if part.start < part.stop:
            span = Span(mask[:, part] if bool((lengths < T).any()) else None, reset[:, part] if reset.any() else None)
            angle, carried = running_angle(turn[:, part], carried, span)
            found.append(angle[:, 1:])
    same = (torch.cat(found, 1) - torch.stack(expected[1:], 1))[mask]
    assert torch.all(wrapped(same).abs() < 1e-12)
    assert wrapped(carried - end).abs().max() < 1e-12 and carried.abs().max() <= math.pi + 1e-12


def test_long_sums_of_angles_keep_their_phase() -> None:
    turn = 0.3 + 0.1 * torch.randn(1, 50_000, 1, 1)
    angle, end = running_angle(turn, None, Span())
    error = wrapped(angle[:, 1:].double() - turn.double().cumsum(1)).abs().max()
    alone = wrapped(turn.cumsum(1).double() - turn.double().cumsum(1)).abs().max()
    assert error < 1e-5 < alone / 10
    assert wrapped(end.double() - turn.double().sum(1)).abs().max() < 1e-5
