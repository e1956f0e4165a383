"""Retention: linear attention with a separate decay rate for each head.

    S_t = γ_t S_{t-1} + k_t v_tᵀ

    RetNet            γ_h = 1 - 2^{-5-h}, constant                                             (Sun et al., 2023)
    Gated Retention   γ_t = σ(w·x_t)^{1/16}, from the data                                     (Sun et al., 2024)

RetNet and Gated Retention rotate q and k by position (interleaved pairs; positions restart at documents), scale k by K^-½
and normalise each head without weights. RetNet's reference code also rescales rows by running sums: that norm cancels it, so
it is left out here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.parts import Carry, Rotary, token_positions
from prism.rules.parts.decays import constant_decay, head_numbers, log_sigmoid_decay
from prism.rules.parts.norms import HeadNorm
from prism.rules.rule import DECAYED_CORRELATION, Paper, Span, per_head


class Retention(HebbianFamily):
    """Base of RetNet and Gated Retention: rotary positions, the norm and the gate."""

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
        """The log-decay `[B, T, H]` for x `[B, T, width]`."""
        raise NotImplementedError

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        positions, following = token_positions(x, carry, span)
        return p._replace(
            q=self.rotary(p.q, positions),
            k=self.rotary(p.k, positions) * self.key_dim**-0.5,
            log_decay=self.log_decay(x),
            carry={**p.carry, **following},
        )


class RetNet(Retention):
    """RetNet: constant decays, values twice as wide as keys.

    Args:
        value_dim: size of a head's values; 2 · width / heads by default.
    """

    name = "retnet"
    paper = Paper("Retentive Network", "Sun et al. 2023", "https://arxiv.org/abs/2307.08621")
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
        return constant_decay(torch.log1p(-torch.exp2(-5 - head_numbers(x, self.heads))), x)


class GatedRetention(Retention):
    """Gated Retention: decays that depend on the data."""

    name = "gated_retention"
    paper = Paper("You Only Cache Once", "Sun et al. 2024", "https://arxiv.org/abs/2405.05254")
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
