"""HGRN: a gated vector recurrence whose forget gate has a lower bound that grows with the layer.

    h_t = f_t ⊙ h_{t-1} + (1 - f_t) ⊙ SiLU(W_i x_t)          f = γ + (1 - γ)σ(W_f x)          (Qin et al., 2023)

γ is as in HGRN2 (gla.py): layer 0 has none, deeper layers remember longer. This is the real-valued recurrence; the first
published version also rotated a phase. The state is as wide as the layer, and the output is RMSNorm(h) times a gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.memories.diagonal import Diagonal
from prism.rules.parts import Carry, ShortConv
from prism.rules.parts.decays import bounded_decay, log_lower_bound
from prism.rules.parts.norms import WidthNorm
from prism.rules.rule import Objective, Paper, Rule, Span, depth, set_initial_weights


class Hgrn(Rule):
    """HGRN: a vector recurrence whose forget gate has a lower bound.

    Heads have no meaning here: every channel is a separate memory.

    Args:
        conv_size: size of a short convolution on W_i x and W_f x, in tokens; 1, as published, means no convolution.
    """

    name = "hgrn"
    paper = Paper(
        "Hierarchically Gated Recurrent Neural Network", "Qin et al. 2023", "https://arxiv.org/abs/2311.04823"
    )
    objective = Objective("–")
    forgetting = "per channel, bounded below"
    transition = "diagonal"
    forms = ("recurrent", "scan")
    shared_maps = ("gate", "out")

    def __init__(
        self, width: int, heads: int, *, conv_size: int = 1, layer_index: int = 0, layer_count: int = 1
    ) -> None:
        depth(layer_index, layer_count)  # checks them
        super().__init__(width, heads, 1, width)
        self.state_size = width
        self.layer_index = layer_index
        self.into = nn.Linear(width, 2 * width, bias=False)
        self.conv = ShortConv(2 * width, conv_size, activation=False)
        self.bound = nn.Parameter(torch.empty(layer_count, width))
        set_initial_weights(self)
        self.norm = WidthNorm(1, width)
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"bound": torch.zeros(self.bound.shape)}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Diagonal, dict[str, Tensor], None]:
        mixed, conv_state = self.conv(self.into(x), carry.get("conv"), span)
        i, f = mixed.chunk(2, -1)
        log_decay, free = bounded_decay(f, log_lower_bound(self.bound, self.layer_index))
        return Diagonal(free * F.silu(i), log_decay, reset=span.reset, mask=span.mask), {"conv": conv_state}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o.to(x.dtype).unsqueeze(-2), F.silu(self.gate(x))))
