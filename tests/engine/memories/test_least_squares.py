"""Mesa's memory: conjugate gradients equal the exact solve, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism import Update
from prism.engine.memories.least_squares import LeastSquares, conjugate_gradients
from tests.helpers import assert_close
from tests.rules.rule_cases import small_mixer, small_tokens, update_and_extra

FORMS = ("recurrent", "chunkwise")


def problem(T: int, K: int, V: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    B, H = 2, 2
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K, dtype=dtype), dim=-1)
    return {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": k,
        "v": torch.randn(B, T, H, V, dtype=dtype),
        "beta": torch.rand(B, T, H, dtype=dtype),
        "log_decay": -0.1 * torch.rand(B, T, H, dtype=dtype),
        "ridge": 0.25 + torch.rand(H, K, dtype=dtype),
        "state": torch.cat([torch.randn(B, H, K, V), torch.eye(K).expand(B, H, K, K)], -1).to(dtype),
    }


def run(p: dict[str, Tensor], form: str, iterations: int = 30) -> tuple[Tensor, Tensor]:
    w = p["beta"].unsqueeze(-1) * torch.cat([p["v"], p["k"]], -1)
    linear = Update(p["q"], p["k"].unsqueeze(3), w.unsqueeze(3), p["log_decay"])
    return prism.memory(LeastSquares(linear, p["ridge"], iterations), p["state"], form)


def exactly(p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """By an exact solve at every token, differentiated by autograd."""
    V = p["v"].shape[-1]
    S, outputs = p["state"], []
    for t in range(p["q"].shape[1]):
        write = p["beta"][:, t, :, None] * torch.cat([p["v"], p["k"]], -1)[:, t]
        S = p["log_decay"][:, t].exp()[..., None, None] * S + p["k"][:, t].unsqueeze(-1) * write.unsqueeze(-2)
        x = torch.linalg.solve(S[..., V:] + torch.diag_embed(p["ridge"]), p["q"][:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", x, S[..., :V]))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("form", FORMS)
def test_conjugate_gradients_are_the_exact_solve(form: str) -> None:
    """Values, state, and all gradients, that of the incoming memory included."""
    p = {name: x.requires_grad_() for name, x in problem(70, 6, 4).items()}
    weight = torch.randn(2, 70, 2, 4, dtype=torch.float64)

    def everything(o: Tensor, S: Tensor) -> list[Tensor]:
        # G is always symmetric, so its gradient is defined only up to symmetry.
        gradients = torch.autograd.grad((o * weight).sum() + S.square().sum(), list(p.values()))
        return [o, S, *gradients]

    labels = ["outputs", "state", *(f"d {name}" for name in p)]
    for label, got, expected in zip(labels, everything(*run(p, form)), everything(*exactly(p)), strict=True):
        if label == "d state":
            got, expected = (torch.cat([g[..., :4], g[..., 4:] + g[..., 4:].mT], -1) for g in (got, expected))
        assert_close(label, got, expected, 1e-9)


def test_thirty_iterations_are_accurate_at_head_size_64() -> None:
    p = problem(80, 64, 64, torch.float32)
    assert_close("outputs", run(p, "chunkwise")[0], exactly(p)[0], 1e-4)
    assert_close("forms", run(p, "chunkwise")[0], run(p, "recurrent")[0], 1e-5)


def test_more_iterations_reduce_the_error() -> None:
    p = problem(20, 16, 4)
    expected = exactly(p)[0]
    errors = [(run(p, "chunkwise", n)[0] - expected).norm().item() for n in (2, 4, 8, 16)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2] > 27 * errors[3]


def test_a_solved_system_stays_solved() -> None:
    """Iterations beyond convergence, and a right-hand side of zero, give numbers and not NaN."""
    b = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    assert torch.equal(conjugate_gradients(lambda p: 2 * p, b, 50), b / 2)


def test_as_many_pairs_as_key_channels_are_recalled() -> None:
    """Without forgetting and with almost no ridge, as many pairs as there are key channels are recalled exactly."""
    K = 8
    p = problem(K, K, 3)
    p |= {"state": torch.zeros_like(p["state"]), "log_decay": torch.zeros_like(p["log_decay"])}
    p |= {"ridge": torch.full_like(p["ridge"], 1e-8), "beta": torch.ones_like(p["beta"])}
    p["q"] = p["k"][:, :1].expand_as(p["k"])  # every token queries the first pair
    o, _ = run(p, "chunkwise", 200)
    assert_close("first value", o[:, -1], p["v"][:, 0], 1e-4)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ridge": torch.ones(3)}, r"ridge has shape \[3\]"),
        ({"iterations": 0}, "iterations must be an integer ≥ 1"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], complaint: str) -> None:
    update, _ = update_and_extra(small_mixer("mesa").rule, small_tokens(1, 3))
    arguments = {"linear": update.linear, "ridge": update.ridge, "iterations": 30} | changes
    with pytest.raises(ValueError, match=complaint):
        LeastSquares(**arguments)


def test_an_erasing_memory_is_refused() -> None:
    update, _ = update_and_extra(small_mixer("delta").rule, small_tokens(1, 3))
    with pytest.raises(ValueError, match="no erase"):
        LeastSquares(update, torch.ones(2, 8))
