"""Gated Slot Attention: a memory of a fixed number of slots, read by softmax over their keys.

    K̃_t = Diag(f_t) K̃_{t-1} + (1 - f_t) k_tᵀ      Ṽ_t = Diag(f_t) Ṽ_{t-1} + (1 - f_t) v_tᵀ      o_t = Ṽ_tᵀ softmax(K̃_t q_t)

                                                                                                    (Zhang et al., 2024)
A slot forgets as much as it takes in; f = σ(W_f x)^{1/8} per slot. SiLU on q, k and v, no scale. The output goes through SiLU
and a norm over all heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.memories.slots import Slots
from prism.rules.hebbian import HebbianFamily
from prism.rules.parts import Carry, split_heads
from prism.rules.parts.decays import log_sigmoid_decay
from prism.rules.parts.norms import WidthNorm
from prism.rules.rule import Objective, Paper, Span, check_integers, per_head


class Gsa(HebbianFamily):
    """Gated Slot Attention: a fixed number of slots, read by softmax.

    Defaults as published: K = V = width / heads, and K slots.

    Args:
        slots: M, the number of slots per head; key_dim by default.
    """

    name = "gsa"
    paper = Paper("Gated Slot Attention", "Zhang et al. 2024", "https://arxiv.org/abs/2409.07146")
    objective = Objective("-⟨Sᵀk, v⟩ + decay, in slots")
    forgetting = "per slot"
    transition = "diagonal"
    forms = ("recurrent", "chunkwise")

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        slots: int | None = None,
        conv_size: int = 1,
    ) -> None:
        K, V = per_head(width, heads, key_dim), per_head(width, heads, value_dim)
        super().__init__(width, heads, K, V, conv_size=conv_size, activation=True)
        slots = K if slots is None else slots
        check_integers(slots=slots)
        self.state_size = heads * slots * (K + V)
        self.decay_in = nn.Linear(width, heads * slots, bias=False)
        self.norm = WidthNorm(heads, V)

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Slots, dict[str, Tensor], None]:
        p = self.project(x, carry, span)
        log_decay = split_heads(log_sigmoid_decay(self.decay_in(x), power=8.0), self.heads)
        taken = -torch.expm1(log_decay)
        return Slots(p.q, p.k, p.v, taken, log_decay, span.reset, span.mask), p.carry, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(F.silu(o)))
