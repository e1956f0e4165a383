"""Rank-L corrections beside another rule's write: what turns Gated DeltaNet into PRISM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.rules.parts import LowRank, ShortConv, l2_normalize, split_heads
from prism.rules.solver import solved_writes
from prism.rules.span import Span


class ResidualWrites(nn.Module):
    """Writes 2 … L of the `lm` preset: low-rank maps of an own anchor, and a learned scale γ that can start at zero."""

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        steps: int,
        solver: str,
        residual: str,
        gain: bool,
        nonlinearity: bool,
        shared_key: bool,
        rank: int,
        step_scale: float,
        conv_size: int,
    ) -> None:
        super().__init__()
        self.heads, self.count = heads, steps - 1
        self.solver, self.nonlinearity = solver, nonlinearity
        keys, values = heads * key_dim, heads * value_dim
        self.conv = ShortConv(width, conv_size)
        self.key = None if shared_key else LowRank(width, keys * self.count, rank)
        self.gain = LowRank(width, values * self.count, rank) if gain else None
        self.expected = LowRank(width, values, rank) if residual == "anchored" else None
        self.beta = nn.Linear(width, heads * self.count, bias=False)
        self.scale = nn.Parameter(torch.full((self.count, heads, value_dim), step_scale))

    def forward(self, x: Tensor, k1: Tensor, v: Tensor, window: Tensor | None, span: Span) -> tuple[Tensor, ...]:
        """k₁ `[B, T, H, K]`, v `[B, T, H, V]` → keys `[B, T, H, L-1, K]`, writes `[B, T, H, L-1, V]`, the window."""
        u, window = self.conv(x, window, span)
        H, n = self.heads, self.count
        if self.key is None:
            k = k1.unsqueeze(3).expand(-1, -1, -1, n, -1)
        else:
            k = l2_normalize(self.key(u).unflatten(-1, (H, n, -1)))
        r = v if self.expected is None else v - split_heads(self.expected(u), H)
        p = None if self.gain is None else self.gain(u).unflatten(-1, (H, n, -1))
        beta = self.beta(u).unflatten(-1, (H, n)).sigmoid()
        return k, solved_writes(r, p, beta, self.scale, self.solver, self.nonlinearity), window
