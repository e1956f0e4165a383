"""Mesa: at every token the memory is the exact solution of a regularised regression on all previous tokens.

    S_t = argmin_S Σ_j ζ_j ‖Sᵀk_j - v_j‖² + tr(Sᵀ Λ S)          o_t = S_tᵀ q_t          (von Oswald et al., 2025)

with ζ_j = β_j γ_{j+1} … γ_t. Where the delta rule takes one step towards the solution, this is the solution; see
engine/memories/least_squares.py for how it is computed. q and k go through a short convolution, SiLU and L2 normalisation;
v is a plain projection. γ and β are sigmoids with a bias, one per head; Λ = softplus(λ) + ¼ per key channel, initially 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.memories.least_squares import LeastSquares
from prism.rules.parts import Carry, ShortConv, at_least_float32, l2_normalize, split_heads
from prism.rules.parts.norms import HeadNorm
from prism.rules.rule import Objective, Paper, Rule, Span, check_integers, per_head, set_initial_weights

_LEAST_RIDGE = 0.25


class Mesa(Rule):
    """Mesa: the exact solution of a regularised regression at every token.

    Defaults as published: K = V = width / heads (128 in the released models), no output gate.

    Args:
        iterations: number of conjugate-gradient iterations, the same in every form and in decoding.
    """

    name = "mesa"
    paper = Paper("MesaNet", "von Oswald et al. 2025", "https://arxiv.org/abs/2506.05233")
    objective = Objective("Σζ‖Sᵀk - v‖² + tr SᵀΛS, solved")
    forgetting = "per head"
    transition = "scalar"
    forms = ("recurrent", "chunkwise")
    shared_maps = ("out",)
    query_first_maps = ("qk",)

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        iterations: int = 30,
    ) -> None:
        K, V = per_head(width, heads, key_dim), per_head(width, heads, value_dim)
        super().__init__(width, heads, K, V)
        check_integers(iterations=iterations)
        self.iterations = iterations
        self.state_size = heads * K * (K + V)
        self.qk = nn.Linear(width, 2 * heads * K, bias=False)
        self.conv = ShortConv(2 * heads * K, conv_size)
        self.value = nn.Linear(width, heads * V, bias=False)
        self.beta = nn.Linear(width, heads)
        self.decay_in = nn.Linear(width, heads)
        self.ridge = nn.Parameter(torch.empty(heads, K))
        set_initial_weights(self)
        self.norm = HeadNorm(V)
        self.out = nn.Linear(heads * V, width, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"ridge": torch.full(self.ridge.shape, math.log(math.expm1(1 - _LEAST_RIDGE)))}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[LeastSquares, dict[str, Tensor], None]:
        mixed, conv_state = self.conv(self.qk(x), carry.get("conv"), span)
        q, k = (l2_normalize(split_heads(z, self.heads)) for z in mixed.chunk(2, -1))
        v = split_heads(self.value(x), self.heads)
        beta = self.beta(x).sigmoid().unsqueeze(-1)
        log_decay = F.logsigmoid(at_least_float32(self.decay_in(x)))
        write = beta * torch.cat([v, k], -1)
        linear = Update(q, k.unsqueeze(3), write.unsqueeze(3), log_decay, reset=span.reset, mask=span.mask)
        ridge = F.softplus(self.ridge) + _LEAST_RIDGE
        return LeastSquares(linear, ridge, self.iterations), {"conv": conv_state}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o))
