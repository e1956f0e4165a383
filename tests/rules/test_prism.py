"""PRISM itself: its equations once more in plain loops, small cases worked out by hand, and Gated DeltaNet as its L = 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism import Mixer, rules
from prism.engine import FORMS
from prism.rules.prism import PaperPrism, Prism
from tests.helpers import assert_close, relative_error

LN3, LN4 = math.log(3), math.log(4)
ONE = 1.2784645427610737
"""SiLU(ONE) = 1."""
PHI = 0.8413447460685429
"""Φ(1), so GELU(1) = PHI and GELU(-1) = PHI - 1."""
PHI2 = 0.9772498680518208
"""Φ(2), so GELU(2) = 2 · PHI2."""
LONG = 1000.0
"""A key this long is normalised to a unit vector to 12 digits in spite of the epsilon in the root."""

FIRST = torch.tensor([[[ONE, 0.0]]], dtype=torch.float64)
BOTH = torch.tensor([[[ONE, 0.0], [0.0, ONE]]], dtype=torch.float64)


def set_weights(mixer: Mixer, **weights: Any) -> Mixer:
    """Give every parameter its numbers; `a__b` stands for `a.b`. Convolutions pass the newest token on unchanged."""
    mixer = mixer.double()
    given = {f"rule.{name.replace('__', '.')}": value for name, value in weights.items()}
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.endswith("conv.weight"):
                parameter.zero_()[-1] = 1
            elif name in given:
                parameter.copy_(torch.tensor(given.pop(name), dtype=torch.float64))
            elif "norm" in name:
                parameter.fill_(1)
            else:
                raise AssertionError(f"{name} has no numbers")
    assert not given, f"no such parameters: {list(given)}"
    return mixer


def paper(p: Any = None, **options: Any) -> Mixer:
    """Two tokens with anchors u = (1, 0) and (0, 1), so that a weight's columns are what it makes of each.

    v = (2, -1), (1, 3), hence r = v - u = (1, -1), (1, 2). k = (1, 0), (.6, .8). β = ¾, ¼. α = ½, .8. q = (0, 1).
    """
    mixer = Mixer("prism", 2, 1, preset="paper", **{"steps": 1, **options})
    weights: dict[str, Any] = {
        "query__weight": [[0.0, 0.0], [LONG, LONG]],
        "value__weight": [[2.0, 1.0], [-1.0, 3.0]],
        "key__weight": [[LONG, 0.6 * LONG], [0.0, 0.8 * LONG]],
        "beta__weight": [[LN3, -LN3]],
        "alpha__weight": [[0.0, LN4]],
        "alpha__bias": [0.0],
        "out__weight": [[1.0, 0.0], [0.0, 1.0]],
    }
    if p is not None:
        weights["gain__weight"] = p
    if options.get("steps") == 2:  # a second key (0, 1) and β₂ = ¾
        weights["beta__weight"] = [[LN3, -LN3], [LN3, LN3]]
        if not options.get("shared_key"):
            weights["key__weight"] += [[0.0, 0.0], [LONG, LONG]]
    return set_weights(mixer, **weights)


def assert_memory(mixer: Mixer, x: Tensor, rows: list[list[float]]) -> None:
    _, state = mixer(x)
    assert_close("memory", state.memory[0, 0], torch.tensor(rows, dtype=torch.float64), 1e-10)


def test_gelu_with_one_step_by_hand() -> None:
    """p = (1, 1), (-1, 1), so p ⊙ r = (1, -1), (-1, 2) and δ = (Φ1, Φ1 - 1), (Φ1 - 1, 2Φ2)."""
    mixer = paper(p=[[1.0, -1.0], [1.0, 1.0]], solver="gelu")
    # After the first token: β δ along k = (1, 0).
    assert_memory(mixer, FIRST, [[0.63100855955, -0.11899144045], [0.0, 0.0]])
    # Then, with S = .8 · ¾ δ₁ in row one: bᵀS = .6 · .6 δ₁, times ¼ · (.6, .8) goes, ¼ · (.6, .8) δ₂ comes:
    #   row one  (.6 - .15 · .36) δ₁ + .15 δ₂ = .546 δ₁ + .15 δ₂
    #   row two        (-.2 · .36) δ₁ + .2 δ₂ = -.072 δ₁ + .2 δ₂
    assert_memory(mixer, BOTH, [[0.43557594326, 0.20654919177], [-0.09230787250, 0.40232312550]])


def test_closed_with_one_step_by_hand() -> None:
    """p = (0, ln 3), (-ln 3, 0), so P = (½, ¾), (¼, ½) and δ = (.5, -.75), (.25, 1)."""
    mixer = paper(p=[[0.0, -LN3], [LN3, 0.0]], solver="closed")
    assert_memory(mixer, FIRST, [[0.375, -0.5625], [0.0, 0.0]])
    # .546 δ₁ + .15 δ₂ and -.072 δ₁ + .2 δ₂, as above.
    assert_memory(mixer, BOTH, [[0.3105, -0.2595], [0.014, 0.254]])


def test_the_answer_by_hand() -> None:
    """q = (0, 1)/√2 reads row two; RMSNorm with ε = 1e-5; the output projection is the identity."""
    mixer = paper(p=[[0.0, -LN3], [LN3, 0.0]], solver="closed")
    y, _ = mixer(BOTH)
    # o = (.014, .254)/√2, mean square (.000196 + .064516)/4 = .016178, y = o / √.016188
    expected = torch.tensor([0.077806600, 1.411634035], dtype=torch.float64)
    assert_close("y", y[0, 1], expected, 1e-8)
    assert torch.count_nonzero(y[0, 0]) == 0  # row two is empty then


def test_gelu_with_two_steps_by_hand() -> None:
    """r₂ = r₁ - δ₁ = (1 - Φ1, -Φ1); p₂ = (0, -1/Φ1) makes p₂ ⊙ r₂ = (0, 1), so δ₂ = (0, Φ1), written along (0, 1)."""
    mixer = paper(p=[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1 / PHI, 0.0]], solver="gelu", steps=2)
    assert_memory(mixer, FIRST, [[0.75 * PHI, 0.75 * (PHI - 1)], [0.0, 0.75 * PHI]])


def test_closed_with_two_steps_by_hand() -> None:
    """P₁ = (½, ¾), P₂ = (¼, ½): δ₂ = P₂(1 - P₁) r = (¼ · ½ · 1, ½ · ¼ · -1)."""
    mixer = paper(p=[[0.0, 0.0], [LN3, 0.0], [-LN3, 0.0], [0.0, 0.0]], solver="closed", steps=2)
    assert_memory(mixer, FIRST, [[0.375, -0.5625], [0.09375, -0.09375]])


@pytest.mark.parametrize(
    ("options", "p", "written"),
    [
        # No anchor: r = v = (2, -1), P = (½, ¾).
        ({"solver": "closed", "residual": "value"}, [[0.0, 0.0], [LN3, 0.0]], [1.0, -0.75]),
        # No gain: p = 1, or P = ½.
        ({"solver": "gelu", "gain": False}, None, [PHI, PHI - 1]),
        ({"solver": "closed", "gain": False}, None, [0.5, -0.5]),
        # No non-linearity: δ = p ⊙ r, for both solvers.
        ({"solver": "gelu", "nonlinearity": False}, [[3.0, 0.0], [0.5, 0.0]], [3.0, -0.5]),
        ({"solver": "closed", "nonlinearity": False}, [[3.0, 0.0], [0.5, 0.0]], [3.0, -0.5]),
        # None of them: v itself, which is a delta rule's write.
        ({"solver": "gelu", "gain": False, "nonlinearity": False, "residual": "value"}, None, [2.0, -1.0]),
    ],
)
def test_ablations_by_hand(options: dict[str, Any], p: Any, written: list[float]) -> None:
    """One token: the memory is ¾ δ along (1, 0)."""
    assert_memory(paper(p, **options), FIRST, [[0.75 * x for x in written], [0.0, 0.0]])


def test_a_shared_key_writes_all_corrections_along_it() -> None:
    """P = ½ twice: δ = ½ r, ¼ r, both times ¾ along (1, 0)."""
    mixer = paper(solver="closed", steps=2, shared_key=True, gain=False)
    assert_memory(mixer, FIRST, [[0.75 * 0.75, -0.75 * 0.75], [0.0, 0.0]])


def test_negative_eigenvalues_double_the_first_step_size_alone() -> None:
    """β₁ = 2 · ¾ writes δ₁ = ½ r, β₂ = ¾ writes δ₂ = ¼ r; then the second token erases with β₁ = 2 · ¼."""
    mixer = paper(solver="closed", steps=2, negative_eigenvalues=True, gain=False)
    assert_memory(mixer, FIRST, [[0.75, -0.75], [0.1875, -0.1875]])
    # .8 S = (.6, -.6), (.15, -.15); along (.6, .8) that is (.48, -.48), of which ½ · (.6, .8) goes.
    # Then ½ · ½ (1, 2) comes along (.6, .8), and ¾ · ¼ (1, 2) along (0, 1).
    assert_memory(mixer, BOTH, [[0.456 + 0.15, -0.456 + 0.3], [-0.042 + 0.2 + 0.1875, 0.042 + 0.4 + 0.375]])


def language(solver: str = "closed", **options: Any) -> Mixer:
    """One token: k₁ = (1, 0), v = (1, 0), β₁ = ¾; k₂ = (0, 1), p₂ = (ln 3, 0), β₂ = ¼, W_u u = (½, -1), γ = (2, 4)."""
    mixer = Mixer("prism", 2, 1, solver=solver, key_dim=2, value_dim=2, rank=2, gate=False, **{"steps": 2, **options})
    identity = [[1.0, 0.0], [0.0, 1.0]]
    weights: dict[str, Any] = {
        "qkv__weight": [[LONG, 0.0], [0.0, 0.0], [LONG, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]],
        "beta__weight": [[LN3 / ONE, 0.0]],
        "decay_in__weight": [[0.0, 0.0]],
        "decay__A_log": [0.0],
        "decay__dt_bias": [0.0],
        "out__weight": identity,
        "writes__key__down__weight": identity,
        "writes__key__up__weight": [[0.0, 0.0], [LONG, 0.0]],
        "writes__gain__down__weight": identity,
        "writes__gain__up__weight": [[LN3, 0.0], [0.0, 0.0]],
        "writes__beta__weight": [[-LN3, 0.0]],
        "writes__scale": [[[2.0, 4.0]]],
    }
    if options.get("residual", "anchored") == "anchored":
        weights["writes__expected__down__weight"] = identity
        weights["writes__expected__up__weight"] = [[0.5, 0.0], [-1.0, 0.0]]
    if options.get("shared_key"):
        weights = {name: value for name, value in weights.items() if not name.startswith("writes__key")}
    if options.get("gain") is False:
        weights = {name: value for name, value in weights.items() if not name.startswith("writes__gain")}
    return set_weights(mixer, **weights)


@pytest.mark.parametrize(
    ("options", "row_one", "row_two"),
    [
        # r₂ = v - W_u u = (½, 1), P = (¾, ½), δ = (.375, .5), times ¼ and γ = (2, 4).
        ({}, [0.75, 0.0], [0.1875, 0.5]),
        # r₂ = v = (1, 0).
        ({"residual": "value"}, [0.75, 0.0], [0.375, 0.0]),
        # P = ½.
        ({"gain": False}, [0.75, 0.0], [0.125, 0.5]),
        # δ = p ⊙ r₂ = (½ ln 3, 0).
        ({"nonlinearity": False}, [0.75, 0.0], [0.25 * LN3, 0.0]),
        # δ = GELU(p ⊙ r₂) with p = 1: GELU(½), GELU(1); GELU(½) = ½ · .6914624612740131.
        ({"solver": "gelu", "gain": False}, [0.75, 0.0], [0.5 * 0.5 * 0.6914624612740131, PHI]),
        # Both along k₁.
        ({"shared_key": True}, [0.9375, 0.5], [0.0, 0.0]),
        # β₁ = 2 · ¾; β₂ stays.
        ({"negative_eigenvalues": True}, [1.5, 0.0], [0.1875, 0.5]),
    ],
)
def test_the_language_preset_by_hand(options: dict[str, Any], row_one: list[float], row_two: list[float]) -> None:
    assert_memory(language(**options), FIRST, [row_one, row_two])


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """SiLU of the causal convolution of one sequence `[T, D]`; the last of `taps` `[4, D]` meets the newest token."""
    padded = torch.cat([x.new_zeros(len(taps) - 1, x.shape[1]), x])
    return F.silu(sum(taps[i] * padded[i : i + len(x)] for i in range(len(taps))))


def corrections(r: Tensor, gains: list[Tensor], solver: str) -> list[Tensor]:
    """The paper's loop; `closed` as the product it is meant to equal."""
    deltas = []
    if solver == "gelu":
        for p in gains:
            deltas.append(F.gelu(p * r))
            r = r - deltas[-1]
        return deltas
    left = torch.ones_like(r)
    for p in gains:
        deltas.append(p.sigmoid() * left * r)
        left = left * (1 - p.sigmoid())
    return deltas


def remember(
    T: int, alpha: Tensor, beta: Tensor, keys: list[Tensor], writes: list[Tensor], q: Tensor
) -> tuple[Tensor, Tensor]:
    """S_t = α S_{t-1}(I - β₁ k₁ k₁ᵀ) + Σ w_l k_lᵀ in the paper's own, value-first layout, for one head."""
    S = q.new_zeros(writes[0].shape[-1], q.shape[-1])
    outputs = []
    for t in range(T):
        k = keys[0][t]
        S = alpha[t] * S @ (torch.eye(len(k), dtype=k.dtype) - beta[t] * torch.outer(k, k))
        S = S + sum(torch.outer(w[t], k[t]) for w, k in zip(writes, keys, strict=True))
        outputs.append(S @ q[t])
    return torch.stack(outputs), S.T


def rms(o: Tensor, weight: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def shaken(mixer: Mixer) -> Mixer:
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer.double()


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("solver", ["gelu", "closed"])
def test_paper_is_its_equations(steps: int, solver: str) -> None:
    D, H, K, T = 8, 2, 3, 9
    V = D // H
    mixer = shaken(Mixer("prism", D, H, preset="paper", steps=steps, solver=solver, key_dim=K))
    p = {name.removeprefix("rule."): value for name, value in mixer.state_dict().items()}
    x = torch.randn(T, D, dtype=torch.float64)
    u = convolve(x, p["conv.weight"])
    heads, memories = [], []
    for h in range(H):
        values, key_rows = slice(h * V, (h + 1) * V), slice(h * K, (h + 1) * K)
        v = u @ p["value.weight"][values].T
        q = unit(u @ p["query.weight"][key_rows].T) / K**0.5
        maps_k = p["key.weight"].view(H, steps, K, D)[h]
        maps_p = p["gain.weight"].view(H, steps, V, D)[h]
        beta = (u @ p["beta.weight"].view(H, steps, D)[h].T).sigmoid()
        alpha = (u @ p["alpha.weight"][h] + p["alpha.bias"][h]).sigmoid()
        deltas = corrections(v - u[:, values], [u @ m.T for m in maps_p], solver)
        writes = [beta[:, l : l + 1] * delta for l, delta in enumerate(deltas)]
        o, S = remember(T, alpha, beta[:, 0], [unit(u @ m.T) for m in maps_k], writes, q)
        heads.append(rms(o, p["norm.norm.weight"]))
        memories.append(S)
    y, state = mixer(x.unsqueeze(0))
    assert_close("y", y[0], torch.cat(heads, -1) @ p["out.weight"].T, 1e-12)
    assert_close("memory", state.memory[0], torch.stack(memories), 1e-12)


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("solver", ["gelu", "closed"])
@pytest.mark.parametrize("residual", ["anchored", "value"])
def test_lm_is_its_equations(steps: int, solver: str, residual: str) -> None:
    D, H, K, V, T, n = 8, 2, 3, 4, 9, steps - 1
    options = {"steps": steps, "solver": solver, "residual": residual, "key_dim": K, "value_dim": V}
    mixer = shaken(Mixer("prism", D, H, **options))
    p = {name.removeprefix("rule."): value for name, value in mixer.state_dict().items()}
    x = torch.randn(T, D, dtype=torch.float64)
    qs, ks, vs = convolve(x @ p["qkv.weight"].T, p["conv.weight"]).split([H * K, H * K, H * V], -1)
    u = convolve(x, p["writes.conv.weight"])

    def low_rank(name: str) -> Tensor:
        return u @ p[f"writes.{name}.down.weight"].T @ p[f"writes.{name}.up.weight"].T

    heads, memories = [], []
    for h in range(H):
        values, key_rows = slice(h * V, (h + 1) * V), slice(h * K, (h + 1) * K)
        q, k1, v = unit(qs[:, key_rows]) / K**0.5, unit(ks[:, key_rows]), vs[:, values]
        beta1 = (x @ p["beta.weight"][h]).sigmoid()
        step_size = F.softplus(x @ p["decay_in.weight"][h] + p["decay.dt_bias"][h])
        alpha = torch.exp(-p["decay.A_log"][h].exp() * step_size)
        r = v - low_rank("expected")[:, values] if residual == "anchored" else v
        gains = low_rank("gain").view(T, H, n, V)[:, h]
        keys = unit(low_rank("key").view(T, H, n, K)[:, h])
        beta = (u @ p["writes.beta.weight"].view(H, n, D)[h].T).sigmoid()
        deltas = corrections(r, [gains[:, l] for l in range(n)], solver)
        scale = p["writes.scale"]  # [L - 1, H, V]
        writes = [beta1[:, None] * v] + [scale[l, h] * beta[:, l : l + 1] * deltas[l] for l in range(n)]
        o, S = remember(T, alpha, beta1, [k1, *(keys[:, l] for l in range(n))], writes, q)
        gate = F.silu(x @ p["gate.weight"][values].T)
        heads.append(rms(o, p["norm.norm.weight"]) * gate)
        memories.append(S)
    y, state = mixer(x.unsqueeze(0))
    assert_close("y", y[0], torch.cat(heads, -1) @ p["out.weight"].T, 1e-12)
    assert_close("memory", state.memory[0], torch.stack(memories), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"negative_eigenvalues": True, "value_dim": 5}, {"gate": False, "conv_size": 1}]
)
@pytest.mark.parametrize("form", FORMS)
def test_lm_with_one_step_is_gated_delta(form: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The same names, the same weights, the same bits."""
    prism = Mixer("prism", 32, 2, preset="lm", steps=1, **options).to(dtype)
    delta = Mixer("gated_delta", 32, 2, **options).to(dtype)
    x = torch.randn(2, 70, 32, dtype=dtype)
    assert prism.state_dict().keys() == delta.state_dict().keys()
    assert not torch.equal(prism(x)[0], delta(x)[0])
    delta.load_state_dict(prism.state_dict(), strict=True)
    y, state = prism(x, form=form)
    same, same_state = delta(x, form=form)
    assert torch.equal(y, same)
    assert all(torch.equal(value, same_state.tensors()[name]) for name, value in state.tensors().items())
    another = Mixer("gated_delta", 32, 2, **options).to(dtype)
    prism.load_state_dict(another.state_dict(), strict=True)
    assert torch.equal(prism(x, form=form)[0], another(x, form=form)[0])


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("solver", ["gelu", "closed"])
def test_step_scale_zero_begins_as_gated_delta(steps: int, solver: str) -> None:
    """An adapter must not change the model it is put on; but γ can learn from the first step."""
    adapted = Mixer("prism", 32, 2, steps=steps, solver=solver, step_scale=0.0)
    delta = Mixer("gated_delta", 32, 2)
    missing, unexpected = adapted.load_state_dict(delta.state_dict(), strict=False)
    assert not unexpected
    assert missing and all(name.startswith("rule.writes.") for name in missing)
    x = torch.randn(2, 70, 32)
    for form in FORMS:
        y, state = adapted(x, form=form)
        same, same_state = delta(x, form=form)
        assert torch.equal(y, same), form
        assert torch.equal(state.memory, same_state.memory), form
    adapted(x)[0].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if "scale" in name}
    assert gradients and all(g is not None and g.norm() > 0 for g in gradients.values())


PRESETS: list[tuple[dict[str, Any], int]] = [
    ({"preset": preset, "solver": solver, "residual": residual}, steps)
    for preset in ("paper", "lm")
    for solver in ("gelu", "closed")
    for residual in ("anchored", "value")
    for steps in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("options", "steps"), PRESETS)
def test_the_write_has_rank_l(options: dict[str, Any], steps: int) -> None:
    """From an empty memory the first token leaves Σ_l k_l w_lᵀ alone."""
    mixer = Mixer("prism", 32, 2, steps=steps, **options).double()
    assert mixer.write_rank == steps
    x = torch.randn(20, 1, 32, dtype=torch.float64)
    _, state = mixer(x)
    assert state.memory.shape[-2] > 4 and state.memory.shape[-1] > 4
    assert (torch.linalg.matrix_rank(state.memory, rtol=1e-9) == steps).all()


@pytest.mark.parametrize("preset", ["paper", "lm"])
def test_a_shared_key_leaves_rank_one(preset: str) -> None:
    mixer = Mixer("prism", 32, 2, preset=preset, steps=4, shared_key=True).double()
    _, state = mixer(torch.randn(20, 1, 32, dtype=torch.float64))
    assert (torch.linalg.matrix_rank(state.memory, rtol=1e-9) == 1).all()


@pytest.mark.parametrize("preset", ["paper", "lm"])
@pytest.mark.parametrize(
    ("switch", "gone"),
    [({"gain": False}, "gain"), ({"residual": "value"}, "expected"), ({"shared_key": True}, "key")],
)
def test_a_switched_off_part_has_no_parameters(preset: str, switch: dict[str, Any], gone: str) -> None:
    def parameters(**options: Any) -> int:
        return sum(p.numel() for p in Mixer("prism", 32, 2, preset=preset, steps=3, **options).parameters())

    if preset == "paper" and gone == "expected":  # its anchor is u itself
        assert parameters(**switch) == parameters()
    else:
        assert parameters(**switch) < parameters()


@pytest.mark.parametrize("width", [512, 1024, 2048])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_the_language_preset_adds_less_than_a_tenth(width: int, steps: int) -> None:
    def parameters(name: str, **options: Any) -> int:
        return sum(p.numel() for p in Mixer(name, width, width // 128, **options).parameters())

    with torch.device("meta"):
        plain, extended = parameters("gated_delta"), parameters("prism", steps=steps)
    assert plain < extended < 1.1 * plain


def test_low_rank_maps_are_as_wide_as_documented() -> None:
    for width, rank in ((32, 8), (512, 16)):
        mixer = Mixer("prism", width, 2)
        assert mixer.state_dict()["rule.writes.key.down.weight"].shape == (rank, width)
    assert Mixer("prism", 32, 2, rank=5).state_dict()["rule.writes.key.down.weight"].shape == (5, 32)


def test_paper_needs_values_as_wide_as_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"value_dim.*width.*2 · 5 ≠ 16"):
        Mixer("prism", 16, 2, preset="paper", value_dim=5)
    Mixer("prism", 16, 2, preset="paper", value_dim=5, residual="value")
    with pytest.raises(ValueError, match="width"):
        Mixer("prism", 17, 2, preset="paper")


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_paper_forgets_at_rates_from_nine_tenths_to_nearly_nothing(heads: int) -> None:
    """With u = 0 the decay is its bias: α = .9 … .999 over the heads. A silent token after a loud one shows it."""
    mixer = Mixer("prism", 8 * heads, heads, preset="paper", conv_size=1).double()
    x = torch.zeros(1, 2, 8 * heads, dtype=torch.float64)
    x[:, 0] = torch.randn(8 * heads, dtype=torch.float64)
    _, loud = mixer(x[:, :1])
    _, silent = mixer(x[:, 1:], loud)
    kept = silent.memory.flatten(2).norm(dim=-1) / loud.memory.flatten(2).norm(dim=-1)
    assert_close("α", kept[0, [0, -1]], torch.tensor([0.9, 0.999]).double(), 1e-6)
    assert (kept[0].diff() > 0).all()


@pytest.mark.parametrize("preset", ["paper", "lm"])
@pytest.mark.parametrize("negative", [False, True])
def test_the_transition_never_grows(preset: str, negative: bool) -> None:
    """What is remembered of one state fades, even with reflections: no eigenvalue beyond ±1."""
    mixer = shaken(Mixer("prism", 16, 2, preset=preset, negative_eigenvalues=negative))
    x = 3 * torch.randn(1, 50, 16, dtype=torch.float64)
    _, one = mixer(x[:, :5])
    _, with_it = mixer(x[:, 5:], one)
    zero = one.map(torch.clone)
    zero.memory.zero_()
    _, without = mixer(x[:, 5:], zero)
    assert (with_it.memory - without.memory).norm() <= one.memory.norm()


@pytest.mark.parametrize(
    "change", [{"solver": "gelu"}, {"residual": "value"}, {"gain": False}, {"nonlinearity": False}]
)
@pytest.mark.parametrize("preset", ["paper", "lm"])
def test_every_switch_changes_the_answer(preset: str, change: dict[str, Any]) -> None:
    base = {"preset": preset, "steps": 3, "solver": "closed"}
    mixer, switched = Mixer("prism", 16, 2, **base), Mixer("prism", 16, 2, **{**base, **change})
    switched.load_state_dict({k: v for k, v in mixer.state_dict().items() if k in switched.state_dict()})
    x = torch.randn(1, 10, 16)
    assert relative_error(switched(x)[0], mixer(x)[0]) > 1e-4


def test_the_rule_prism_is_the_lm_layer_and_paper_a_class_of_its_own() -> None:
    assert type(Mixer("prism", 8, 2).rule) is Prism is rules.get("prism")
    assert type(Mixer("prism", 8, 2, preset="paper").rule) is PaperPrism
    assert Prism.option_names()[0] == "preset"
    assert set(PaperPrism.option_names()) < set(Prism.option_names())
    for preset in ("lm", "paper"):
        assert Mixer("prism", 8, 2, preset=preset).rule.name == "prism"
    with pytest.raises(ValueError, match="preset must be one of lm, paper, got 'big'"):
        Mixer("prism", 8, 2, preset="big")
