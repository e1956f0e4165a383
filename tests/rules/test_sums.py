"""Normalised, slot and scalar memories written out as sums, and rules that are special cases of others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from prism import rules
from prism.engine.memories.scalar_cells import ScalarCells
from prism.rules.based import taylor_features
from prism.rules.mlstm import stabiliser
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.rules.rule_cases import SMALL_HEADS, SMALL_WIDTH, small_mixer, small_tokens, update_and_extra

T = 19


def left(log_decay: Tensor, t: int, j: int) -> Tensor:
    """What is left at t of what was written at j: `[B, T, …]` → `[B, …]`."""
    return log_decay[:, j + 1 : t + 1].sum(1).exp()


@pytest.mark.parametrize("form", rules.get("gsa").forms)
def test_slot_attention_is_softmax_over_decayed_sums(form: str) -> None:
    update, _ = update_and_extra(small_mixer("gsa", slots=5, value_dim=3).rule, small_tokens(2, T))
    expected = []
    for t in range(T):
        share = [left(update.log_decay, t, j) * update.write[:, j] for j in range(t + 1)]  # [B, H, M]
        keys = sum(s[..., None] * update.k[:, j, :, None] for j, s in enumerate(share))
        values = sum(s[..., None] * update.v[:, j, :, None] for j, s in enumerate(share))
        found = torch.einsum("bhmk,bhk->bhm", keys, update.q[:, t]).softmax(-1)
        expected.append(torch.einsum("bhm,bhmv->bhv", found, values))
    o, state = prism.memory(update, form=form)
    assert_close("outputs", o, torch.stack(expected, 1), 1e-12)
    assert_close("keys", state["keys"], keys, 1e-12)
    assert_close("values", state["values"], values, 1e-12)


def test_slots_take_what_they_lose() -> None:
    """Written with 1 - f and decayed by f: a slot that always sees the same value ends up holding it."""
    mixer = small_mixer("gsa")
    x = small_tokens(1, 1).expand(1, 4000, SMALL_WIDTH)
    update, _ = update_and_extra(mixer.rule, x)
    _, state = prism.memory(update)
    assert_close("slots", state["values"], update.v[:, 0, :, None].expand_as(state["values"]), 1e-6)


@pytest.mark.parametrize("form", rules.get("mlstm").forms)
def test_mlstm_is_a_ratio_of_unstabilised_sums(form: str) -> None:
    rule: Any = small_mixer("mlstm").rule
    rule.eps = 0.0
    rule.norm, rule.out = torch.nn.Flatten(2), torch.nn.Identity()
    x = small_tokens(2, T)
    update, (m, mixed, z) = update_and_extra(rule, x)
    got = (
        rule.output(prism.memory(update, form=form)[0], x, (m, torch.zeros_like(mixed), torch.full_like(z, 50.0))) / 50
    )

    branch, _ = rule.up(x).chunk(2, -1)
    q, k, v = rule.query(mixed), rule.key(mixed), rule.value(branch)
    gates = torch.cat([q, k, v], -1)
    written, log_f = rule.input_gate(gates).exp(), F.logsigmoid(rule.forget_gate(gates))  # [B, T, H]
    q, k, v = (part.unflatten(-1, (SMALL_HEADS, -1)) for part in (q, k / math.sqrt(rule.key_dim), v))
    for t in range(T):
        weight = [left(log_f, t, j) * written[:, j] * (q[:, t] * k[:, j]).sum(-1) for j in range(t + 1)]
        numerator = sum(w[..., None] * v[:, j] for j, w in enumerate(weight))
        divisor = sum(weight).abs().clamp(min=1.0)[..., None]
        assert_close(f"token {t}", got[:, t], (numerator / divisor).flatten(1), 1e-10)


def test_mlstm_survives_input_gates_that_would_overflow() -> None:
    """ĩ of hundreds: exp of it is infinite in any precision, what is stored is not. A shift of all ĩ changes nothing."""
    mixer = small_mixer("mlstm", torch.float32)
    x = small_tokens(1, 60, dtype=torch.float32)
    mixer.rule.input_gate.bias.fill_(500.0)
    y, state = mixer(x)
    assert y.isfinite().all() and state.memory.isfinite().all()
    mixer.rule.input_gate.bias.fill_(300.0)
    assert_close("shifted", mixer(x)[0], y, 1e-5)


def test_the_stabiliser_is_its_recurrence() -> None:
    log_f, write = -torch.rand(2, 33, 3).double(), 3 * torch.randn(2, 33, 3).double()
    reset = torch.rand(2, 33) < 0.1
    start = torch.randn(2, 3).double()
    before, m, last = stabiliser(log_f, write, start, Span(reset=reset))
    current = start
    for t in range(33):
        current = torch.where(reset[:, t, None], 0.0, current)
        assert_close(f"before {t}", before[:, t], current, 1e-12)
        current = torch.maximum(log_f[:, t] + current, write[:, t])
        assert_close(f"at {t}", m[:, t], current, 1e-12)
    assert_close("last", last, current, 1e-12)


def test_taylor_features_are_the_series_of_the_exponential() -> None:
    q, k = torch.randn(50, 16).double(), torch.randn(50, 16).double()
    s = (q * k).sum(-1) / 4
    assert taylor_features(q).shape[-1] == 273
    product = (taylor_features(q) * taylor_features(k)).sum(-1)
    assert_close("kernel", product, 1 + s + s**2 / 2, 1e-12)
    assert product.min() >= 0.5


def test_based_is_a_weighted_mean() -> None:
    rule: Any = small_mixer("based").rule
    rule.out = torch.nn.Identity()
    x = small_tokens(1, T)
    update, _ = update_and_extra(rule, x)
    q, k, v = (part.unflatten(-1, (SMALL_HEADS, -1)) for part in rule.qkv(x).split(rule.sizes, -1))
    s = torch.einsum("bthk,bjhk->bhtj", q, k) / 4
    weights = (1 + s + s**2 / 2).tril()
    expected = torch.einsum("bhtj,bjhv->bthv", weights / weights.sum(-1, keepdim=True), v)
    assert_close("outputs", rule.output(prism.memory(update)[0], x, None), expected.flatten(-2), 1e-10)


def test_scalar_cells_by_hand() -> None:
    """c and n unstabilised, one number at a time."""
    inputs, R = torch.randn(1, 7, 4, 2, 3).double(), 0.3 * torch.randn(4, 2, 3, 3).double()
    o, state = prism.memory(ScalarCells(inputs, R))
    h, c, n = torch.zeros(2, 3).double(), torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for t in range(7):
        new = torch.zeros_like(h)
        for head in range(2):
            for cell in range(3):
                i, f, z, g = (
                    inputs[0, t, gate, head, cell] + sum(h[head, v] * R[gate, head, v, cell] for v in range(3))
                    for gate in range(4)
                )
                c[head, cell] = f.sigmoid() * c[head, cell] + i.exp() * z.tanh()
                n[head, cell] = f.sigmoid() * n[head, cell] + i.exp()
                new[head, cell] = g.sigmoid() * c[head, cell] / n[head, cell]
        h = new
        assert_close(f"token {t}", o[0, t], h, 1e-12)
    m = state[0, 3]
    assert_close("c", state[0, 1] * m.exp(), c, 1e-12)
    assert_close("n", state[0, 2] * m.exp(), n, 1e-12)


def test_an_empty_cell_may_find_its_input_gate_shut() -> None:
    """ĩ of -200 at a document's first token: exp(-ĩ) would be infinite, and the cell keeps none of its nothing."""
    inputs = torch.randn(1, 4, 4, 2, 3)
    inputs[:, 0, 0] = inputs[:, 2, 0] = -200.0
    reset = torch.tensor([[False, False, True, False]])
    inputs.requires_grad_()
    o, state = prism.memory(ScalarCells(inputs, 0.3 * torch.randn(4, 2, 3, 3), reset))
    _, _, z, g = inputs.unbind(2)
    assert_close("first", o[:, 0], g[:, 0].sigmoid() * z[:, 0].tanh(), 1e-6)
    assert state.isfinite().all()
    assert torch.autograd.grad(o.sum(), inputs)[0].isfinite().all()


def test_scalar_cells_have_no_other_form() -> None:
    update, _ = update_and_extra(small_mixer("slstm").rule, small_tokens(1, 3))
    for form in ("parallel", "chunkwise", "scan"):
        with pytest.raises(ValueError, match=f"form '{form}' cannot serve ScalarCells, which has the forms recurrent"):
            prism.memory(update, form=form)


def test_mamba2_with_a_constant_gate_is_retention_without_rotation() -> None:
    mamba: Any = small_mixer("mamba2", key_dim=6).rule
    gamma = 1 - 2.0 ** (-5 - torch.arange(SMALL_HEADS).double())  # RetNet's
    with torch.no_grad():
        mamba.decay_in.weight.zero_()
        step = mamba.decay.step_size(torch.zeros(SMALL_HEADS).double())
        mamba.decay.A_log.copy_((-gamma.log() / step).log())
    x = small_tokens(2, T)
    update, v = update_and_extra(mamba, x)
    assert_close("decay", update.log_decay, update_and_extra(small_mixer("retnet").rule, x)[0].log_decay, 1e-12)
    age = torch.arange(T)[:, None] - torch.arange(T)
    retained = torch.where(age >= 0, gamma[:, None, None] ** age, 0.0)  # [H, T, T]
    scores = torch.einsum("btk,bjk->btj", update.q[:, :, 0], update.k[:, :, 0, 0])
    expected = torch.einsum("btj,htj,bjhv->bthv", scores, retained, step[:, None] * v)
    assert_close("outputs", prism.memory(update)[0], expected, 1e-12)


@pytest.mark.parametrize(("gated", "alone"), [(False, "delta"), (True, "gated_delta")])
def test_a_delta_product_of_one_factor_is_the_delta_rule(gated: bool, alone: str) -> None:
    sizes = {"key_dim": 6, "value_dim": 5, "negative_eigenvalues": True, "gate": True}
    product = small_mixer("delta_product", householders=1, forget_gate=gated, **sizes)
    delta = small_mixer(alone, **sizes)
    delta.load_state_dict(product.state_dict())  # strictly: they have the same modules
    x = small_tokens(2, T)
    assert_close("outputs", product(x)[0], delta(x)[0], 1e-12)


def test_longhorn_with_one_number_a_channel_is_the_exact_implicit_step() -> None:
    """N = 1: k kᵀ is its own diagonal, and S_t minimises ‖S - S_{t-1}‖² + β‖Sᵀk - x‖²."""
    rule: Any = small_mixer("longhorn", key_dim=1).rule
    x = small_tokens(1, 1)
    update, (u, _) = update_and_extra(rule, x)
    before = torch.randn(1, 2 * SMALL_WIDTH, 1).double()
    _, after = prism.memory(update, before)
    step, k, _ = rule.select(u).split(rule.sizes, -1)
    beta = (rule.step_in(step) + rule.step_bias).sigmoid()
    S = after[:, :, 0].clone().requires_grad_()
    loss = ((S - before[:, :, 0]) ** 2 + beta[0] * (S * k[0] - u[0]) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, S)
    assert gradient.abs().max() < 1e-12


def test_longhorn_has_a_slope_where_it_learns_nothing() -> None:
    """Logits of β so far below zero that their exponential is infinite."""
    mixer = prism.Mixer("longhorn", SMALL_WIDTH, SMALL_HEADS)
    torch.nn.init.constant_(mixer.rule.step_bias, -200.0)
    y, _ = mixer(small_tokens(1, 5, dtype=torch.float32))
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


def test_hgrn_keeps_what_its_lower_bound_says() -> None:
    """A gate that is shut still keeps γ = ℓ/Λ of the state."""
    mixer = prism.Mixer("hgrn", SMALL_WIDTH, SMALL_HEADS, layer_index=2, layer_count=4).double().requires_grad_(False)
    mixer.rule.into.weight[SMALL_WIDTH:] = 0
    update, _ = update_and_extra(mixer.rule, small_tokens(1, 4))
    assert_close("f", update.log_decay.exp(), torch.full_like(update.log_decay, 0.5 + 0.5 * 0.5), 1e-6)


def test_rg_lru_begins_documents_at_full_size() -> None:
    """Where there is nothing to keep the input is not scaled down: the first state is i ⊙ x itself."""
    rule: Any = small_mixer("rg_lru").rule
    x = small_tokens(1, 6)
    reset = torch.zeros(1, 6, dtype=torch.bool)
    reset[0, 4] = True
    update, _, _ = rule.update(x, {}, Span(reset=reset))
    u, room = update.write
    assert (room[0, [0, 4]] == 1).all() and (room[0, [1, 2, 3, 5]] < 1).all()
    h, _ = prism.memory(update)
    assert_close("starts", h[0, [0, 4]], u[0, [0, 4]], 1e-12)
    rest = torch.exp(2 * update.log_decay) + room**2
    assert_close("size", rest[0, 1:4], torch.ones_like(rest[0, 1:4]), 1e-12)
