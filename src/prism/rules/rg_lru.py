"""RG-LRU, the recurrence of Griffin and RecurrentGemma: a vector state in which each channel has its own forget gate.

    h_t = a_t ⊙ h_{t-1} + √(1 - a_t²) ⊙ (i_t ⊙ x_t)          a = exp(-8 r softplus(Λ))          (De et al., 2024)

r and i are sigmoids of block-diagonal maps of x, one block per head. √(1 - a²) keeps the size of h independent of a; at the
start of a document, where h is zero, it is replaced by 1. x comes from a short convolution (with bias, no activation), and h
is multiplied by a GELU branch. Λ starts such that exp(-softplus Λ)² is uniform on [.9², .999²], as in the released code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.memories.diagonal import Diagonal
from prism.rules.parts import BlockLinear, Carry, ShortConv, at_least_float32, token_positions
from prism.rules.rule import Objective, Paper, Rule, Span, set_initial_weights

_MAX_SLOPE = 1000.0


class RgLru(Rule):
    """RG-LRU, the gated linear recurrence of Griffin.

    As published, the state has `width` channels.
    """

    name = "rg_lru"
    paper = Paper("Griffin", "De et al. 2024", "https://arxiv.org/abs/2402.19427")
    objective = Objective("–")
    forgetting = "per channel"
    transition = "diagonal"
    forms = ("recurrent", "scan")
    shared_maps = ("branch", "out")

    def __init__(self, width: int, heads: int, *, conv_size: int = 4) -> None:
        if width % heads:
            raise ValueError(f"heads must divide width = {width}, got {heads}")
        super().__init__(width, heads, 1, width // heads)
        self.state_size = width
        self.into = nn.Linear(width, width)
        self.branch = nn.Linear(width, width)
        self.conv = ShortConv(width, conv_size, bias=True, activation=False)
        self.input_gate = BlockLinear(width, heads, bias=True)
        self.forget_gate = BlockLinear(width, heads, bias=True)
        self.rate = nn.Parameter(torch.empty(width))  # Λ
        set_initial_weights(self)
        self.out = nn.Linear(width, width)

    def initial_weights(self) -> dict[str, Tensor]:
        kept = torch.empty(self.width).uniform_(0.9**2, 0.999**2).sqrt()
        return {"rate": torch.log(torch.expm1(-kept.log()))}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Diagonal, dict[str, Tensor], None]:
        u, conv_state = self.conv(self.into(x), carry.get("conv"), span)
        positions, counted = token_positions(x, carry, span)
        log_decay = -8 * at_least_float32(self.forget_gate(u)).sigmoid() * F.softplus(self.rate)
        room = _ClippedRoot.apply(-torch.expm1(2 * log_decay))
        room = torch.where((positions == 0).unsqueeze(-1), 1.0, room)
        write = (u * self.input_gate(u).sigmoid(), room)
        return Diagonal(write, log_decay, reset=span.reset, mask=span.mask), {"conv": conv_state, **counted}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(o * F.gelu(self.branch(x), approximate="tanh"))


class _ClippedRoot(torch.autograd.Function):
    """√x with a gradient of at most `_MAX_SLOPE`: where a is nearly 1 the exact one is unbounded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / (4 * x).clamp(min=_MAX_SLOPE**-2).sqrt()

    jvp = backward  # the derivative is a factor of each number
