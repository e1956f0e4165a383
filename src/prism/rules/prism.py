"""PRISM: forget like Gated DeltaNet, write a rank-L correction found by an unrolled residual solver.

    S_t = α_t S_{t-1}(I - β₁ k₁ k₁ᵀ) + Σ_l β_l δ_l k_lᵀ

The solver imitates L steps of test-time descent on ½‖σ(Sk) - v‖² without looking at S: a short convolution u of the input
(the *anchor*) stands in for Sk, a linear map p_l of u for σ', and the residual is taken down step by step:

    gelu     δ_l = GELU(p_l ⊙ r_l),             r_{l+1} = r_l - δ_l                        (the paper's loop, Eqs. 9-18)
    closed   δ_l = P_l ⊙ Π_{j<l}(1 - P_j) ⊙ r,  P = σ(p)                                   (the same loop without GELU)

Presets. `paper` is the paper's layer: everything is a full linear map of u, r₁ = v - u, all L writes come from the solver.
`lm` (default) is Gated DeltaNet (same modules, same state-dict names, so that L = 1 *is* Gated DeltaNet) plus L - 1 solver
writes through low-rank maps.

Choices the paper leaves open, as this library makes them: SiLU on the anchor (Algorithm 1 has it, Eq. 9 not); β = σ(·),
so that the transition never grows; q and every k_l L2-normalised and q scaled by K^-½; α per head, its bias spread so that
α runs from .9 to .999 over the heads; RMSNorm per head before the output projection; u split over heads, which needs
H·V = width (`paper`), or mapped to them by a low-rank W_u (`lm`).
"""

from __future__ import annotations

from typing import Any

from prism.engine.fused import SOLVERS
from prism.rules.objectives import RESIDUAL_PROXY
from prism.rules.rule import Rule, construct

RESIDUALS = ("anchored", "value")


class Prism(Rule):
    """The rule as users name it; `preset` picks which of its two layers is built."""

    name = "prism"
    objective = RESIDUAL_PROXY
    forgetting = "per head, and along k₁"
    transition = "α · Householder"

    @classmethod
    def build(cls, width: int, heads: int, **options: Any) -> Rule:
        preset = options.pop("preset", "lm")
        presets = _presets()
        if preset not in presets:
            raise ValueError(f"preset must be one of {', '.join(presets)}, got {preset!r}")
        return construct(presets[preset], width, heads, options)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        if cls is not Prism:
            return super().option_names()
        return tuple(dict.fromkeys(["preset", *(name for kind in _presets().values() for name in kind.option_names())]))


def _presets() -> dict[str, type[Rule]]:
    from prism.rules.prism_lm import LanguagePrism
    from prism.rules.prism_paper import PaperPrism

    return {"lm": LanguagePrism, "paper": PaperPrism}


def check_solver(steps: int, solver: str, residual: str) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number ≥ 1, got {steps!r}")
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
    if residual not in RESIDUALS:
        raise ValueError(f"residual must be one of {', '.join(RESIDUALS)}, got {residual!r}")
