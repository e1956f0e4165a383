"""HSTU: pointwise attention, gated (Zhai et al., 2024, "Actions speak louder than words").

    u, v, q, k = SiLU(W x)        o_t = (1/n_t) Σ_j SiLU(q_tᵀ k_j · K^-½ + bias_{t-j}) v_j        y = W_o (norm(o) ⊙ u)

A token's weight does not depend on the other tokens, so o also reflects how many similar tokens were seen. Our choices: the
scale K^-½; division by the number n_t of tokens seen (theirs is by the longest length, which a stream does not have); a bias
by distance in which far distances share entries (engine/memories/pointwise.py); an RMS norm; no bias by the time between
events. Made for recommenders, in blocks without a feed-forward layer, which the gate replaces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.memories.pointwise import DISTANCES, Pointwise
from prism.rules.parts import Carry, split_heads
from prism.rules.parts.norms import WidthNorm
from prism.rules.rule import Objective, Paper, Rule, Span, per_head, set_initial_weights


class Hstu(Rule):
    """HSTU: pointwise attention with SiLU weights and a gate.

    Sees the whole document, and its state grows: `state_size` is the number of values that one token adds.

    Args:
        key_dim: size of a head's queries and keys; width / heads by default.
        value_dim: size of a head's values; key_dim by default.
    """

    name = "hstu"
    paper = Paper("Actions Speak Louder than Words", "Zhai et al. 2024", "https://arxiv.org/abs/2402.17152")
    objective = Objective("min_o Σ SiLU(qᵀk + bias)‖o - v‖²")
    forgetting = "none"
    transition = "grows"
    forms = ("recurrent", "parallel")
    constant_state = False

    def __init__(self, width: int, heads: int, *, key_dim: int | None = None, value_dim: int | None = None) -> None:
        key_dim = per_head(width, heads, key_dim)
        value_dim = key_dim if value_dim is None else value_dim
        super().__init__(width, heads, key_dim, value_dim)
        self.state_size = heads * (key_dim + value_dim)
        self.sizes = [heads * value_dim, heads * value_dim, heads * key_dim, heads * key_dim]
        self.uvqk = nn.Linear(width, sum(self.sizes), bias=False)
        self.distance_bias = nn.Parameter(torch.empty(heads, DISTANCES))
        set_initial_weights(self)
        self.norm = WidthNorm(heads, value_dim)
        self.out = nn.Linear(heads * value_dim, width, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"distance_bias": torch.zeros(self.heads, DISTANCES)}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Pointwise, dict[str, Tensor], Tensor]:
        u, *vqk = F.silu(self.uvqk(x)).split(self.sizes, -1)
        v, q, k = (split_heads(part, self.heads) for part in vqk)
        return Pointwise(q, k, v, None, span.reset, span.mask, self.distance_bias), {}, u

    def output(self, o: Tensor, x: Tensor, extra: Tensor) -> Tensor:
        return self.out(self.norm(o, extra))
