"""S4D, the predecessor of selective state spaces: a linear system with a constant, complex diagonal per channel.

    h' = A h + u,  y = 2 Re(C h) + D u          discretised:  h_t = e^{ΔA} h_{t-1} + (e^{ΔA} - 1)/A · u_t      (Gu et al., 2022)

Only u depends on the data, so the whole layer is also one convolution (the form `"parallel"`). Complex numbers come in
conjugate pairs, of which one is stored: N / 2 per channel. A starts as -½ + iπn, Δ log-uniform in [.001, .1]; the real part
of A is stored as a logarithm. GELU, then a linear map with a gated linear unit. The authors train A and Δ with a smaller
learning rate and no weight decay.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.memories.diagonal import Diagonal
from prism.rules.parts import Carry
from prism.rules.rule import Objective, Paper, Rule, Span, set_initial_weights


class S4d(Rule):
    """S4D: a linear system with a constant complex diagonal for every channel.

    Defaults as published: N = 64. Heads have no meaning here.

    Args:
        key_dim: N, the state size of a channel; even.
    """

    name = "s4d"
    paper = Paper(
        "On the Parameterization and Initialization of Diagonal State Space Models",
        "Gu et al. 2022",
        "https://arxiv.org/abs/2206.11893",
    )
    objective = Objective("projection of the history (HiPPO)")
    forgetting = "per channel and state, constant"
    transition = "constant diagonal, complex"
    forms = ("recurrent", "parallel", "scan")
    shared_maps = ("out",)

    def __init__(self, width: int, heads: int, *, key_dim: int = 64) -> None:
        super().__init__(width, heads, key_dim, 1)
        if key_dim % 2:
            raise ValueError(f"key_dim must be even (it is stored as key_dim / 2 complex numbers), got {key_dim}")
        self.state_size = width * key_dim
        pairs = key_dim // 2
        self.log_step = nn.Parameter(torch.empty(width))
        self.log_rate = nn.Parameter(torch.empty(width, pairs))  # log of -Re A
        self.frequency = nn.Parameter(torch.empty(width, pairs))  # Im A
        self.read = nn.Parameter(torch.empty(width, pairs, 2))  # C
        self.skip = nn.Parameter(torch.empty(width))
        set_initial_weights(self)
        self.out = nn.Linear(width, 2 * width)

    def initial_weights(self) -> dict[str, Tensor]:
        width, pairs = self.log_rate.shape
        low, high = math.log(1e-3), math.log(1e-1)
        return {
            "log_step": low + torch.rand(width) * (high - low),
            "log_rate": torch.full((width, pairs), math.log(0.5)),
            "frequency": (math.pi * torch.arange(pairs)).expand(width, -1),
            "read": torch.randn(width, pairs, 2) * math.sqrt(0.5),
            "skip": torch.randn(width),
        }

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Diagonal, dict[str, Tensor], None]:
        A = torch.complex(-self.log_rate.exp(), self.frequency)  # [D, N/2]
        log_decay = A * self.log_step.exp().unsqueeze(-1)
        update = Diagonal(
            write=(x.unsqueeze(-1), (torch.expm1(log_decay) / A)[None, None]),
            log_decay=log_decay[None, None],
            read=2 * torch.view_as_complex(self.read)[None, None],
            reset=span.reset,
            mask=span.mask,
        )
        return update, {}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return F.glu(self.out(F.gelu(o + self.skip.to(x.dtype) * x)), -1)
