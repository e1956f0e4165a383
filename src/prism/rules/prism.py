"""PRISM: forgets like Gated DeltaNet, and writes a rank-L correction computed by an unrolled residual solver.

    S_t = α_t (I - β₁ k₁ k₁ᵀ) S_{t-1} + Σ_l β_l k_l δ_lᵀ

The solver imitates L steps of test-time gradient descent on ½‖σ(Sᵀk) - v‖² without reading S. A short convolution u of
the input (the *anchor*) stands in for Sᵀk, and a linear map p_l of u for σ'. The residual is reduced step by step:

    gelu     δ_l = GELU(p_l ⊙ r_l),             r_{l+1} = r_l - δ_l                        (the paper's loop, Eqs. 9-18)
    closed   δ_l = P_l ⊙ Π_{j<l}(1 - P_j) ⊙ r,  P = σ(p)                                   (the same loop without GELU)

Presets. `paper` (`PaperPrism`) is the paper's layer: every map is a full linear map of u, r₁ = v - u, and all L writes come
from the solver. `lm` (`Prism`, the default) is Gated DeltaNet plus L - 1 solver writes through low-rank maps. It has the
same modules and state-dict names, so that L = 1 *is* Gated DeltaNet.

Our choices where the paper leaves them open: SiLU on the anchor (Algorithm 1 has it, Eq. 9 not); β = σ(·),
so that the transition never grows; q and every k_l L2-normalised and q scaled by K^-½; α per head, its bias spread so that
α runs from .9 to .999 over the heads; RMSNorm per head before the output projection; u split over heads, which needs
H·V = width (`paper`), or mapped to them by a low-rank W_u (`lm`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.fused import SOLVERS, Corrections, solved_writes
from prism.engine.pieces import plain_linear
from prism.engine.step_plan import DeltaPlan, LowRankPlan, WritesPlan
from prism.rules.delta import GatedDelta
from prism.rules.parts import (
    Carry,
    LowRank,
    ShortConv,
    fused_linears,
    is_plain_conv,
    l2_normalize,
    map_plan,
    split_heads,
)
from prism.rules.parts.norms import HeadNorm
from prism.rules.rule import RESIDUAL_PROXY, Paper, Rule, Span, check_integers, construct, per_head, set_initial_weights

RESIDUALS = ("anchored", "value")

_PAPER = Paper(
    "PRISM: Parallel Residual Iterative Sequence Model", "Jiang et al. 2026", "https://arxiv.org/abs/2602.10796"
)
_FORGETTING = "per head, and along k₁"
_TRANSITION = "α · Householder"


class Prism(GatedDelta):
    """PRISM's `lm` layer: Gated DeltaNet plus L - 1 solver writes.

    Args:
        preset: `"lm"` for this layer or `"paper"` for `PaperPrism`, which has no `rank`, `step_scale` or `gate`.
        steps: L, the number of writes per token; 1 is Gated DeltaNet itself.
        solver: `"closed"` or `"gelu"`; the default of `paper` is `"gelu"`.
        residual: `"anchored"` starts from v - W_u u, `"value"` from v.
        gain: whether the solver has a learned gain; False sets every p_l to 1 (`closed`: every P to ½).
        nonlinearity: whether the solver has its non-linearity, GELU (`closed`: the sigmoid).
        shared_key: whether all L corrections are written along k₁.
        rank: rank of the low-rank maps; by default max(8, width / 32), which adds less than 10 % to the mixer's parameters.
        step_scale: initial value of γ; with 0 a model starts exactly as Gated DeltaNet (for adapters).
    """

    name = "prism"
    paper = _PAPER
    objective = RESIDUAL_PROXY
    forgetting = _FORGETTING
    transition = _TRANSITION

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        steps: int = 2,
        solver: str = "closed",
        residual: str = "anchored",
        gain: bool = True,
        nonlinearity: bool = True,
        shared_key: bool = False,
        rank: int | None = None,
        step_scale: float = 1.0,
        conv_size: int = 4,
        gate: bool = True,
        negative_eigenvalues: bool = False,
    ) -> None:
        check_solver(steps, solver, residual)
        super().__init__(
            width,
            heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=conv_size,
            gate=gate,
            negative_eigenvalues=negative_eigenvalues,
        )
        self.write_rank = steps
        self.writes = None
        if steps > 1:
            self.writes = ResidualWrites(
                width,
                heads,
                self.key_dim,
                self.value_dim,
                steps=steps,
                solver=solver,
                residual=residual,
                gain=gain,
                nonlinearity=nonlinearity,
                shared_key=shared_key,
                rank=max(8, width // 32) if rank is None else rank,
                step_scale=step_scale,
                conv_size=conv_size,
            )

    @classmethod
    def build(cls, width: int, heads: int, **options: Any) -> Rule:
        preset = options.pop("preset", "lm")
        if preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
        return construct(cls if preset == "lm" else PRESETS[preset], width, heads, options)

    @classmethod
    def option_parameters(cls) -> dict[str, inspect.Parameter]:
        """`preset` and the options of `lm`, which include all of `paper`."""
        preset = inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default="lm", annotation="str")
        return {"preset": preset, **super().option_parameters()}

    def corrections(self, x: Tensor, carry: Carry, span: Span) -> tuple[Corrections | None, dict[str, Tensor]]:
        if self.writes is None:
            return None, {}
        corrections, conv_state = self.writes(x, carry.get("anchor"), span)
        return corrections, {"anchor": conv_state}

    def step_plan(self) -> DeltaPlan | None:
        plan = super().step_plan()
        if plan is None or self.writes is None:
            return plan
        writes = self.writes.step_plan()
        return None if writes is None else plan._replace(writes=writes)


class ResidualWrites(nn.Module):
    """Writes 2 … L of the `lm` preset: low-rank maps of a separate anchor, and a learned scale γ that can start at zero."""

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        steps: int,
        solver: str,
        residual: str,
        gain: bool,
        nonlinearity: bool,
        shared_key: bool,
        rank: int,
        step_scale: float,
        conv_size: int,
    ) -> None:
        super().__init__()
        self.heads, self.count = heads, steps - 1
        self.solver, self.nonlinearity = solver, nonlinearity
        keys, values = heads * key_dim, heads * value_dim
        self.conv = ShortConv(width, conv_size)
        self.key = None if shared_key else LowRank(width, keys * self.count, rank)
        self.gain = LowRank(width, values * self.count, rank) if gain else None
        self.expected = LowRank(width, values, rank) if residual == "anchored" else None
        self.beta = nn.Linear(width, heads * self.count, bias=False)
        self.scale = nn.Parameter(torch.empty(self.count, heads, value_dim))
        self.step_scale = step_scale
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"scale": torch.full(self.scale.shape, float(self.step_scale))}

    def forward(self, x: Tensor, conv_state: Tensor | None, span: Span) -> tuple[Corrections, Tensor]:
        """x `[B, T, width]` → the corrections, and the conv state of the anchor."""
        u, conv_state = self.conv(x, conv_state, span)
        H, n = self.heads, self.count
        maps = (self.key, self.gain, self.expected)
        *outputs, beta = fused_linears(u, *[m for m in maps if m is not None], self.beta)
        keys, gains, expected = (None if m is None else outputs.pop(0) for m in maps)
        corrections = Corrections(
            keys=None if keys is None else keys.unflatten(-1, (H, n, -1)),
            expected=None if expected is None else split_heads(expected, H),
            gains=None if gains is None else gains.unflatten(-1, (H, n, -1)),
            beta=beta.unflatten(-1, (H, n)).sigmoid(),
            scale=self.scale,
            solver=self.solver,
            nonlinearity=self.nonlinearity,
        )
        return corrections, conv_state

    def step_plan(self) -> WritesPlan | None:
        """As `Rule.step_plan`, for these writes."""
        maps = [m for m in (self.key, self.gain, self.expected) if m is not None]
        plans = {m: plan for m in maps if isinstance(plan := map_plan(m), LowRankPlan)}
        if len(plans) < len(maps) or not plain_linear(self.beta) or not is_plain_conv(self.conv):
            return None
        key, gain, expected = (None if m is None else plans[m] for m in (self.key, self.gain, self.expected))
        given = (self.conv.weight, key, gain, expected, self.beta.weight, self.scale)
        return WritesPlan(*given, self.solver, self.nonlinearity)


class PaperPrism(Rule):
    """PRISM's `paper` layer: Eqs. 9-18 and Algorithm 1 as written, every map a full linear map of the anchor.

    Args:
        steps: L, the number of writes per token.
        solver: `"gelu"` or `"closed"`.
        residual: `"anchored"` starts from v - u, `"value"` from v (the ablation without anchor).
        gain: whether the solver has a learned gain; False sets every p_l to 1 (`closed`: every P to ½).
        nonlinearity: whether the solver has its non-linearity, GELU (`closed`: the sigmoid).
        shared_key: whether all L corrections are written along k₁.
        negative_eigenvalues: whether β₁ is 2σ(·) instead of σ(·).
    """

    name = "prism"
    paper = _PAPER
    objective = RESIDUAL_PROXY
    forgetting = _FORGETTING
    transition = _TRANSITION
    shared_maps = ("query", "out")

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        steps: int = 2,
        solver: str = "gelu",
        residual: str = "anchored",
        gain: bool = True,
        nonlinearity: bool = True,
        shared_key: bool = False,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
    ) -> None:
        check_solver(steps, solver, residual)
        super().__init__(width, heads, per_head(width, heads, key_dim), per_head(width, heads, value_dim), steps)
        if residual == "anchored" and heads * self.value_dim != width:
            raise ValueError(
                f"preset 'paper' takes the residual v - u with u split over the heads: heads · value_dim must be width, "
                f"got {heads} · {self.value_dim} ≠ {width} (or set residual='value')"
            )
        self.steps, self.solver, self.residual, self.nonlinearity = steps, solver, residual, nonlinearity
        self.beta_scale = 2.0 if negative_eigenvalues else 1.0
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.conv = ShortConv(width, conv_size)
        self.query = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, values, bias=False)
        self.key = nn.Linear(width, keys * (1 if shared_key else steps), bias=False)
        self.gain = nn.Linear(width, values * steps, bias=False) if gain else None
        self.beta = nn.Linear(width, heads * steps, bias=False)
        self.alpha = nn.Linear(width, heads)
        self.norm = HeadNorm(self.value_dim)
        self.out = nn.Linear(values, width, bias=False)
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        """α from .9 to .999 over the heads, evenly in log(1 - α); a single head gets the middle, .99."""
        forgotten = torch.logspace(-1, -3, self.heads) if self.heads > 1 else torch.tensor([0.01])
        return {"alpha.bias": torch.logit(1 - forgotten)}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        u, conv_state = self.conv(x, carry.get("conv"), span)
        H, L = self.heads, self.steps
        q = l2_normalize(split_heads(self.query(u), H)) * self.key_dim**-0.5
        k = l2_normalize(self.key(u).unflatten(-1, (H, -1, self.key_dim)))  # [B, T, H, L or 1, K]
        v, expected = split_heads(self.value(u), H), split_heads(u, H) if self.residual == "anchored" else None
        p = None if self.gain is None else self.gain(u).unflatten(-1, (H, L, -1))
        beta = self.beta(u).unflatten(-1, (H, L)).sigmoid()
        if self.beta_scale != 1.0:
            beta = torch.cat([self.beta_scale * beta[..., :1], beta[..., 1:]], -1)
        update = Update(
            q,
            k.expand(-1, -1, -1, L, -1),
            solved_writes(v, expected, p, beta, None, self.solver, self.nonlinearity),
            F.logsigmoid(self.alpha(u)),
            erase_strength=beta[..., 0],
            erase_first=True,
            reset=span.reset,
            mask=span.mask,
        )
        return update, {"conv": conv_state}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o))


PRESETS: dict[str, type[Rule]] = {"lm": Prism, "paper": PaperPrism}


def check_solver(steps: int, solver: str, residual: str) -> None:
    """Raise a ValueError for options of the solver that do not exist."""
    check_integers(steps=steps)
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
    if residual not in RESIDUALS:
        raise ValueError(f"residual must be one of {', '.join(RESIDUALS)}, got {residual!r}")
