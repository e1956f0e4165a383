"""Mamba-2: a selective state space model whose state matrix is one number per head.

    S_t = exp(-Δ_t e^{A_log}) S_{t-1} + B_t (Δ_t x_t)ᵀ          y_t = S_tᵀ C_t + D x_t          (Dao & Gu, 2024)

B is the key and C the query, shared by all heads of a group; x is the value. All three go through one short convolution
with bias, and SiLU, and are neither normalised nor scaled. Unlike in the delta family, the gate comes *before* the norm, and
the norm is over all heads together (also with several groups): out(RMSNorm(y ⊙ SiLU(z))).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.parts import Carry
from prism.rules.parts.decays import SoftplusDecay
from prism.rules.parts.norms import WidthNorm
from prism.rules.rule import DECAYED_CORRELATION, Paper, Span, per_head, set_initial_weights


class Mamba2(HebbianFamily):
    """Mamba-2: a selective state space with one decay per head.

    Defaults as published: K = 128 (`d_state`), H·V = 2 · width.

    Args:
        key_dim: N, the state size of a channel (`d_state`).
        value_dim: channels of a head; 2 · width / heads by default.
        groups: number of separate B and C; a divisor of `heads`.
    """

    name = "mamba2"
    paper = Paper("Transformers are SSMs", "Dao & Gu 2024", "https://arxiv.org/abs/2405.21060")
    objective = DECAYED_CORRELATION
    forgetting = "per head"
    transition = "scalar"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int = 128,
        value_dim: int | None = None,
        groups: int = 1,
        conv_size: int = 4,
    ) -> None:
        super().__init__(
            width,
            heads,
            key_dim,
            per_head(width, heads, value_dim, ratio=2),
            conv_size=conv_size,
            conv_bias=True,
            activation=True,
            groups=groups,
        )
        self.decay_in = nn.Linear(width, heads, bias=False)
        self.decay = SoftplusDecay(heads, a_range=(1.0, 16.0))
        self.skip = nn.Parameter(torch.empty(heads))
        set_initial_weights(self)
        self.gate = nn.Linear(width, heads * self.value_dim, bias=False)
        self.norm = WidthNorm(heads, self.value_dim)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"skip": torch.ones(self.heads)}

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        z = self.decay_in(x)
        write = p.v * self.decay.step_size(z).unsqueeze(-1).to(p.v.dtype)
        return p._replace(v=write, log_decay=self.decay(z), extra=p.v)

    def output(self, o: Tensor, x: Tensor, extra: Tensor) -> Tensor:
        """`extra` `[B, T, H, V]` is the value before it is scaled by Δ."""
        assert self.gate is not None
        y = o + self.skip.unsqueeze(-1).to(o.dtype) * extra
        gate = F.silu(self.gate(x)).view_as(y)
        return self.out(self.norm(y * gate))
