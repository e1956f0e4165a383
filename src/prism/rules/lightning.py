"""Lightning attention (TransNormer, MiniMax; Qin et al., 2024): retention with ALiBi's slopes, weaker in deeper layers.

    S_t = γ_h S_{t-1} + k_t v_tᵀ,   γ_h = exp(-s_h (1 - ℓ/(Λ-1) + 1e-5)),   s_h = 2^{-8(h+1)/H}

SiLU on q, k and v, no scale, no rotation, and one norm over all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.parts import Carry, LowRank
from prism.rules.parts.decays import constant_decay, head_numbers
from prism.rules.parts.norms import WidthNorm
from prism.rules.rule import DECAYED_CORRELATION, Paper, Span, depth, per_head


class Lightning(HebbianFamily):
    """Lightning attention: linear attention with a constant decay per head.

    The slopes shrink towards the last layer, which hardly forgets: pass `layer_index` and `layer_count` in a stack.
    """

    name = "lightning"
    paper = Paper("Lightning Attention-2", "Qin et al. 2024", "https://arxiv.org/abs/2401.04658")
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
        slopes = torch.exp2(-8 * (head_numbers(x, self.heads) + 1) / self.heads)
        return super().project(x, carry, span)._replace(log_decay=constant_decay(-self.slope_scale * slopes, x))

    def activate(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()
