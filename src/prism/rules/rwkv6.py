"""RWKV-6: linear attention with a decay per key channel that reads before it writes.

    S_t = Diag(w_t) S_{t-1} + k_t v_tᵀ          o_t = (S_{t-1} + (u ⊙ k_t) v_tᵀ)ᵀ r_t          (Peng et al., 2024)

The token itself enters the answer with a learned weight u instead of the 1 it is written with. w = exp(-exp(w₀ + low-rank));
which part of the previous token each projection sees depends on the data.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.rules.initial import set_initial_weights, uniform
from prism.rules.objectives import DECAYED_CORRELATION
from prism.rules.parts import Carry, at_least_float32, shift
from prism.rules.rule import Paper
from prism.rules.rwkv import ConstantStart, Own, RwkvFamily
from prism.rules.span import Span
from prism.rules.token_shift import DynamicTokenMix, mixtures, ramp


class Rwkv6(RwkvFamily):
    """RWKV-6 (Finch), with its own token shift.

    Args:
        mix_rank: rank of the maps that decide how much each projection sees of the previous token.
        decay_rank: rank of the map to the decay.
    """

    name = "rwkv6"
    paper = Paper("Eagle and Finch", "Peng et al. 2024", "https://arxiv.org/abs/2404.05892")
    objective = DECAYED_CORRELATION
    forgetting = "per channel"
    transition = "diagonal"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        layer_index: int = 0,
        layer_count: int = 1,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, layer_index, layer_count)
        self.mix = DynamicTokenMix(5, width, mix_rank)
        self.decay_in = ConstantStart(width, heads * self.key_dim, decay_rank, torch.tanh)
        self.bonus = nn.Parameter(torch.empty(heads, self.key_dim))
        set_initial_weights(self)
        self.gate = nn.Linear(width, heads * self.value_dim, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        keys, channels = self.heads * self.key_dim, ramp(self.heads * self.key_dim)
        powers = [0.5, 1, 1, 1, 0.5, 1]  # r, w, k, v, g and their own input
        mix = mixtures(self.width, powers, self.layer_index, self.layer_count)
        mix[3] -= 0.3 * self.depth
        zigzag = ((torch.arange(keys) + 1) % 3 - 1) * 0.1
        return {
            **super().initial_weights(),
            "mix.mu": mix[:5],
            "mix.first": mix[5],
            "decay_in.up.weight": uniform((keys, self.decay_in.sizes[-1]), 0.01),
            "decay_in.up.bias": -6 + 5 * channels ** (0.7 + 1.3 * self.depth),
            "bonus": (self.depth * (1 - channels) + zigzag).view(self.heads, -1),
        }

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], Own]:
        previous, last = shift(x, carry.get("shift"), span)
        xr, xw, xk, xv, xg = self.mix(x, previous)
        r, k, v = self.heads_of(self.receptance(xr), self.key(xk), self.value(xv))
        (log_decay,) = self.heads_of(-at_least_float32(self.decay_in(xw)).exp())
        update = Update(r, k.unsqueeze(3), v.unsqueeze(3), log_decay, read="before", reset=span.reset, mask=span.mask)
        return update, {"shift": last}, Own(r, k, v, F.silu(self.gate(xg)))

    def output(self, o: Tensor, x: Tensor, extra: Own) -> Tensor:
        return self.out(self.norm(o + extra.bonus(self.bonus)) * extra.gate)
