"""PRISM on cases small enough to work out by hand: both solvers, the ablations and both presets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from prism import Mixer
from tests.helpers import assert_close

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


def test_the_output_by_hand() -> None:
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
