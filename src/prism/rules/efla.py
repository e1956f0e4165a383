"""EFLA, error-free linear attention: the delta rule with the exact solution of its differential equation.

DeltaNet is an Euler step of length β of the gradient flow on ½‖Sᵀk - v‖², with k and v held constant during a token:

    dS/dτ = -k kᵀ S + k vᵀ

kkᵀ has rank 1, so the flow has a closed form, which is a delta rule of another step size (Lei, Zhang & Poria, 2025):

    S_t = (I - α k kᵀ) S_{t-1} + α k vᵀ          α = (1 - exp(-β λ)) / λ,   λ = ‖k‖²

The eigenvalue along k is exp(-βλ), in (0, 1] for every k: a key may have any length, and is not normalised. A long key
overwrites, a short one hardly writes. β = σ(·), the short convolutions and the normalised query are DeltaNet's.

The memory is computed with unit keys u = k / √(λ + ε): α k kᵀ = α(λ + ε) u uᵀ and α k vᵀ = α√(λ + ε) u vᵀ, for any ε. The
entries of a chunk's triangular system are then at most 1, whatever the lengths of its keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prism.engine import Update
from prism.engine.layer_ops import UNIT_EPS, delta_columns
from prism.engine.recompute import cheap
from prism.rules.delta import DeltaFamily
from prism.rules.parts import Carry, split_heads
from prism.rules.parts.decays import DRAWN
from prism.rules.rule import REGRESSION_FLOW, Paper, Span, per_head

_SERIES_BELOW = 0.05
_SERIES = [(-1) ** n / math.factorial(n + 1) for n in range(8)]


def mean_decay(x: Tensor) -> Tensor:
    """(1 - e^{-x}) / x for x ≥ 0, the mean of e^{-τ} over τ in [0, x]; 1 at x = 0.

    A power series replaces the quotient where x is small: there the quotient's gradient would be rounding errors.
    """
    small = x < _SERIES_BELOW
    near, far = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = torch.full_like(x, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series = series * near + coefficient
    return torch.where(small, series, -torch.expm1(-far) / far)


class Efla(DeltaFamily):
    """Error-free linear attention: the delta rule with an exact step, and keys of any length.

    Defaults are DeltaNet's. Its authors train it with a higher learning rate than DeltaNet.
    """

    name = "efla"
    paper = Paper("Error-Free Linear Attention is a Free Lunch", "Lei et al. 2025", "https://arxiv.org/abs/2512.12602")
    objective = REGRESSION_FLOW
    forgetting = "along the key"
    transition = "I - rank 1"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        gate: bool = False,
        start: str = DRAWN,
    ) -> None:
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            gate=gate,
            conv_size=conv_size,
            start=start,
        )

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        def columns(projected: Tensor, beta: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            mixed, conv_state = self.conv(projected, carry.get("conv"), span)
            erase, write = self.strengths(mixed, beta)
            return (*delta_columns(mixed, write, self.key_dim), erase), conv_state

        (q, k, w, erase), conv_state = cheap(columns, self.qkv(x), self.beta_and_decay(x)[0])
        update = Update(q, k, w, erase_strength=erase, erase_first=True, reset=span.reset, mask=span.mask)
        return update, {"conv": conv_state}, None

    def strengths(self, mixed: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """What multiplies u uᵀ and u vᵀ, each `[B, T, H]`, from q̃, k and v `[B, T, …]` and β `[B, T, H]`."""
        key = split_heads(mixed.split(self.sizes, -1)[1], self.heads)
        precise = torch.promote_types(key.dtype, torch.float32)
        squared = torch.linalg.vector_norm(key, dim=-1, dtype=precise).square()
        beta = beta.to(squared.dtype)
        alpha = beta * mean_decay(beta * squared)
        length = (squared + UNIT_EPS).sqrt()
        return (alpha * length.square()).to(mixed.dtype), (alpha * length).to(mixed.dtype)
