"""Retention: linear attention that forgets at a rate of its own per head.

    S_t = γ_t S_{t-1} + k_t v_tᵀ

    RetNet            γ_h = 1 - 2^{-5-h}, constant                                             (Sun et al., 2023)
    Lightning         γ_h = exp(-s_h (1 - ℓ/(Λ-1) + 1e-5)), ALiBi slopes s_h = 2^{-8(h+1)/H}   (Qin et al., 2024)
    Gated Retention   γ_t = σ(w·x_t)^{1/16}, from the data                                     (Sun et al., 2024)

RetNet and Gated Retention rotate q and k by position (interleaved pairs; positions restart at documents), scale k by K^-½
and normalise each head without weights. RetNet's reference code also rescales rows by running sums: invisible behind that
norm, and left out here. Lightning (TransNormer, MiniMax) has SiLU on q, k and v, no scale, and one norm over all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.rules.decays import log_sigmoid_decay
from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.norms import HeadNorm, WidthNorm
from prism.rules.objectives import DECAYED_CORRELATION
from prism.rules.parts import Carry, LowRank, Rotary, place
from prism.rules.rule import depth, per_head
from prism.rules.span import Span


class Retention(HebbianFamily):
    """What RetNet and Gated Retention share."""

    objective = DECAYED_CORRELATION
    transition = "scalar"

    def __init__(
        self, width: int, heads: int, key_dim: int, value_dim: int, conv_size: int, endpoint: bool = False
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, conv_size=conv_size, activation=conv_size > 1)
        self.rotary = Rotary(key_dim, endpoint=endpoint, interleaved=True)
        self.norm = HeadNorm(value_dim, affine=False)
        self.gate = nn.Linear(width, heads * value_dim, bias=False)

    def log_decay(self, x: Tensor) -> Tensor:
        """`[B, T, H]`."""
        raise NotImplementedError

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        positions, following = place(x, carry, span)
        return p._replace(
            q=self.rotary(p.q, positions),
            k=self.rotary(p.k, positions) * self.key_dim**-0.5,
            log_decay=self.log_decay(x),
            carry={**p.carry, **following},
        )


class RetNet(Retention):
    name = "retnet"
    forgetting = "per head, constant"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 1,
    ) -> None:
        K, V = per_head(width, heads, key_dim), per_head(width, heads, value_dim, ratio=2)
        super().__init__(width, heads, K, V, conv_size, endpoint=True)

    def log_decay(self, x: Tensor) -> Tensor:
        return _constant(torch.log1p(-torch.exp2(-5 - _heads(x, self.heads))), x)


class GatedRetention(Retention):
    name = "gated_retention"
    forgetting = "per head"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 1,
    ) -> None:
        K, V = per_head(width, heads, key_dim), per_head(width, heads, value_dim)
        super().__init__(width, heads, K, V, conv_size)
        self.decay_in = nn.Linear(width, heads, bias=False)

    def log_decay(self, x: Tensor) -> Tensor:
        return log_sigmoid_decay(self.decay_in(x))


class Lightning(HebbianFamily):
    """The slopes shrink towards the last layer, which hardly forgets: give `layer_index` and `layer_count` in a stack."""

    name = "lightning"
    objective = DECAYED_CORRELATION
    forgetting = "per head, constant"
    transition = "scalar"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 1,
        layer_index: int = 0,
        layer_count: int = 1,
    ) -> None:
        K, V = per_head(width, heads, key_dim), per_head(width, heads, value_dim)
        super().__init__(width, heads, K, V, conv_size=conv_size, activation=True)
        self.slope_scale = 1 - depth(layer_index, layer_count) + 1e-5
        self.norm = WidthNorm(heads, V)
        self.gate = LowRank(width, heads * V, rank=V)

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        slopes = torch.exp2(-8 * (_heads(x, self.heads) + 1) / self.heads)
        return super().project(x, carry, span)._replace(log_decay=_constant(-self.slope_scale * slopes, x))

    def activate(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()


def _heads(x: Tensor, heads: int) -> Tensor:
    """0 … H - 1 in float64: rates are found exactly, then rounded once."""
    return torch.arange(heads, dtype=torch.float64, device=x.device)


def _constant(rate: Tensor, x: Tensor) -> Tensor:
    """`[H]` → `[B, T, H]`, float32 unless x is float64."""
    return rate.to(torch.promote_types(x.dtype, torch.float32)).expand(*x.shape[:2], -1)
