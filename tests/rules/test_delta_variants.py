"""Comba, EFLA and Gated DeltaNet-2 by their equations, token by token, from the layer's input to the memory's output."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from prism import rules
from prism.rules.efla import mean_decay
from prism.rules.parts import l2_normalize
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.rules.rule_cases import HEADS, WIDTH, first_update, perturbed_rule, tokens


def convolved(rule: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q̃, k̃ and v, `[B, T, H, …]`: the convolution of four tokens by its definition."""
    z = rule.qkv(x)
    padded = F.pad(z, (0, 0, 3, 0))
    z = F.silu(sum(padded[:, i : i + z.shape[1]] * rule.conv.weight[i] for i in range(4)))
    q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in z.split(rule.sizes, -1))
    return q, k, v


def answers(rule: Any, x: Tensor, state: Tensor) -> Tensor:
    return prism.memory(rule.update(x, {}, Span())[0], state, form="chunkwise")[0]


@torch.no_grad()
def test_comba_by_its_equations() -> None:
    rule: Any = perturbed_rule("comba", torch.float64)
    x = tokens(2, 9)
    q, k, v = convolved(rule, x)
    share = rule.share.sigmoid()[:, None]
    q = l2_normalize(q - rule.correction[:, None] * share * k) * rule.key_dim**-0.5
    k, beta = l2_normalize(k), rule.beta(x).sigmoid()
    alpha = (-rule.decay.A_log.exp() * F.softplus(rule.decay_in(x) + rule.decay.dt_bias)).exp()
    S = start = torch.randn(2, HEADS, rule.key_dim, rule.value_dim, dtype=torch.float64)
    expected = []
    for t in range(9):
        key, rate = k[:, t].unsqueeze(-1), beta[:, t, :, None, None]
        erased = rate * share.unsqueeze(-1) * key @ (key.mT @ S)
        S = alpha[:, t, :, None, None] * S - erased + rate * key @ v[:, t].unsqueeze(-2)
        expected.append((S * q[:, t].unsqueeze(-1)).sum(-2))
    assert_close("answers", answers(rule, x, start), torch.stack(expected, 1), 1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0])
@torch.no_grad()
def test_gdn2_by_its_equations(factor: float) -> None:
    rule: Any = perturbed_rule("gdn2", torch.float64, negative_eigenvalues=factor == 2.0)
    x = tokens(2, 9)
    q, k, v = convolved(rule, x)
    q, k = l2_normalize(q) * rule.key_dim**-0.5, l2_normalize(k)
    erase, write = (gate(x).sigmoid().unflatten(-1, (HEADS, -1)) for gate in (rule.erase, rule.write))
    step = F.softplus(rule.decay_in.up(rule.decay_in.down(x)) + rule.decay.dt_bias).unflatten(-1, (HEADS, -1))
    alpha = (-rule.decay.A_log.exp()[:, None] * step).exp()
    S = start = torch.randn(2, HEADS, rule.key_dim, rule.value_dim, dtype=torch.float64)
    expected = []
    for t in range(9):
        key, seen = k[:, t].unsqueeze(-1), (factor * erase * k)[:, t].unsqueeze(-2)
        S = alpha[:, t].unsqueeze(-1) * S
        S = S - key @ (seen @ S) + key @ (write * v)[:, t].unsqueeze(-2)
        expected.append((S * q[:, t].unsqueeze(-1)).sum(-2))
    assert_close("answers", answers(rule, x, start), torch.stack(expected, 1), 1e-12)


@torch.no_grad()
def test_gdn2_with_equal_gates_is_kda() -> None:
    kda: Any = perturbed_rule("kda", torch.float64)
    gdn2: Any = perturbed_rule("gdn2", torch.float64)
    gdn2.load_state_dict(kda.state_dict(), strict=False)
    for gate in (gdn2.erase, gdn2.write):  # every channel of a head gets the head's β
        gate.weight.copy_(kda.beta.weight.repeat_interleave(len(gate.weight) // HEADS, 0))
    x = tokens(2, 7)
    o, state = prism.memory(first_update(gdn2, x))
    expected, final = prism.memory(first_update(kda, x))
    assert_close("answers", o, expected, 1e-12)
    assert_close("state", state, final, 1e-12)


def test_comba_starts_as_published() -> None:
    rule: Any = rules.get("comba").build(WIDTH, HEADS)
    assert torch.equal(rule.share, torch.ones(HEADS)) and torch.equal(rule.correction, torch.ones(HEADS))
    small: Any = rules.get("comba").build(WIDTH, HEADS, correction=0.02)
    assert_close("correction", small.correction, torch.full((HEADS,), 0.02), 1e-7)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@torch.no_grad()
def test_efla_is_the_exact_flow(scale: float) -> None:
    """exp(β [[-kkᵀ, kvᵀ], [0, 0]]) holds both e^{-βkkᵀ} and the integral of what flows in; keys of any length."""
    rule: Any = perturbed_rule("efla", torch.float64)
    x = scale * tokens(2, 9)
    q, k, v = convolved(rule, x)
    q, beta = l2_normalize(q) * rule.key_dim**-0.5, rule.beta(x).sigmoid()
    K, V = rule.key_dim, rule.value_dim
    S = start = torch.randn(2, HEADS, K, V, dtype=torch.float64)
    expected = []
    for t in range(9):
        key = k[:, t].unsqueeze(-1)
        flow = torch.zeros(2, HEADS, K + V, K + V, dtype=torch.float64)
        flow[..., :K, :K], flow[..., :K, K:] = -key @ key.mT, key @ v[:, t].unsqueeze(-2)
        flow = torch.linalg.matrix_exp(beta[:, t, :, None, None] * flow)
        S = flow[..., :K, :K] @ S + flow[..., :K, K:]
        expected.append((S * q[:, t].unsqueeze(-1)).sum(-2))
    assert_close("answers", answers(rule, x, start), torch.stack(expected, 1), 1e-11)


@torch.no_grad()
def test_efla_is_the_delta_rule_of_its_own_step_size(fla: SimpleNamespace) -> None:
    rule: Any = perturbed_rule("efla", torch.float64)
    x = 3 * tokens(2, 9)
    q, k, v = convolved(rule, x)
    length = k.square().sum(-1)
    alpha = (1 - (-rule.beta(x).sigmoid() * length).exp()) / length
    heads_first = [z.transpose(1, 2) for z in (l2_normalize(q), k, v, alpha)]
    start = torch.randn(2, HEADS, rule.key_dim, rule.value_dim, dtype=torch.float64)
    expected, _ = fla.delta_rule_recurrence(*heads_first, start)
    assert_close("answers", answers(rule, x, start), expected.transpose(1, 2), 1e-6)  # their states are float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_decay_and_its_gradient_have_no_cancellation(dtype: torch.dtype) -> None:
    values = [1e-30, 1e-12, 1e-5, 1e-3, 0.04, 0.0499, 0.0501, 0.1, 1.0, 20.0, 1e3, 1e6]
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    y = mean_decay(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    exact, y = [Decimal(value) for value in x.tolist()], y.detach()
    decays = [(1 - (-z).exp(), (-z).exp()) for z in exact]
    tolerance = 30 * torch.finfo(dtype).eps
    for i, (z, (gone, left)) in enumerate(zip(exact, decays, strict=True)):
        mean = Decimal(1) if z < Decimal("1e-20") else gone / z
        assert abs(float(y[i]) / float(mean) - 1) < tolerance
        if z > Decimal("1e-6"):  # Decimal has 28 digits, of which the difference loses most
            assert abs(float(slope[i]) / float((left - mean) / z) - 1) < 10 * tolerance
        else:
            assert abs(float(slope[i]) + 0.5) < 1e-5
    zero = torch.zeros(1, dtype=dtype, requires_grad=True)
    mean_decay(zero).backward()
    assert mean_decay(zero).item() == 1.0 and zero.grad is not None and zero.grad.item() == -0.5


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e4])
def test_efla_takes_keys_of_any_length(scale: float) -> None:
    mixer = prism.Mixer("efla", WIDTH, HEADS)
    x = (scale * torch.randn(1, 70, WIDTH)).requires_grad_()
    y, state = mixer(x)
    (y.sum() + state.memory.sum()).backward()
    assert bool(torch.isfinite(y).all()) and all(bool(torch.isfinite(p.grad).all()) for p in mixer.parameters())
    assert x.grad is not None and bool(torch.isfinite(x.grad).all())
