"""sLSTM, the scalar memory of xLSTM: LSTM cells with an exponential input gate, a normaliser, and memory mixing.

    c_t = f c_{t-1} + i tanh(z̃)      n_t = f n_{t-1} + i      h_t = σ(õ) c_t / n_t          (Beck et al., 2024)

ĩ, f̃, z̃ and õ also see h_{t-1} of their head. This makes it the only rule that is inherently sequential: it has just the
recurrent form (engine/memories/scalar_cells.py says why). ĩ and f̃ come from a convolved branch, z̃ and õ from the input
itself, all through block-diagonal maps, one block per head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.engine.memories.scalar_cells import ScalarCells
from prism.rules.parts import BlockLinear, Carry, ShortConv, split_heads
from prism.rules.parts.norms import HeadLayerNorm
from prism.rules.rule import Objective, Paper, Rule, Span, depth, set_initial_weights


class Slstm(Rule):
    """sLSTM: LSTM cells with exponential gates, a normaliser and memory mixing.

    Defaults as published: `width` cells; initially no memory mixing, and forget biases from 5 to -7 within a head, steeper in
    deeper layers. The output is normalised per head and projected.
    """

    name = "slstm"
    paper = Paper("xLSTM", "Beck et al. 2024", "https://arxiv.org/abs/2405.04517")
    objective = Objective("–")
    forgetting = "per cell, sees h"
    transition = "nonlinear"
    forms = ("recurrent",)
    shared_maps = ("out",)

    def __init__(
        self, width: int, heads: int, *, conv_size: int = 4, layer_index: int = 0, layer_count: int = 1
    ) -> None:
        if width % heads:
            raise ValueError(f"heads must divide width = {width}, got {heads}")
        size = width // heads
        super().__init__(width, heads, 1, size)
        self.state_size = 4 * width
        self.steepness = 0.3 + 1.3 * depth(layer_index, layer_count)
        self.conv = ShortConv(width, conv_size, bias=True)
        self.gates = nn.ModuleList(BlockLinear(width, heads) for _ in range(4))  # ĩ, f̃, z̃, õ
        self.recurrent = nn.Parameter(torch.empty(4, heads, size, size))
        self.bias = nn.Parameter(torch.empty(4, heads, size))
        self.norm = HeadLayerNorm(heads, size, eps=1e-5, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        size = self.value_dim
        bias = torch.zeros(4, self.heads, size)
        bias[1] = 5 - 12 * (torch.arange(size) / max(1, size - 1)) ** self.steepness
        return {"recurrent": torch.zeros(4, self.heads, size, size), "bias": bias}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[ScalarCells, dict[str, Tensor], None]:
        mixed, conv_state = self.conv(x, carry.get("conv"), span)
        inputs = [gate(mixed if i < 2 else x) for i, gate in enumerate(self.gates)]
        added = split_heads(torch.stack(inputs, 2), self.heads) + self.bias.to(x.dtype)  # [B, T, 4, H, V]
        return ScalarCells(added, self.recurrent, span.reset, span.mask), {"conv": conv_state}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o))
