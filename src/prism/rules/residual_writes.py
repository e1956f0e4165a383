"""Rank-L corrections beside another rule's write: what turns Gated DeltaNet into PRISM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.engine.fused import Corrections
from prism.rules.parts import LowRank, ShortConv, linears, split_heads
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

    def forward(self, x: Tensor, window: Tensor | None, span: Span) -> tuple[Corrections, Tensor]:
        """`[B, T, width]` → the corrections, and the anchor's window."""
        u, window = self.conv(x, window, span)
        H, n = self.heads, self.count
        maps = (self.key, self.gain, self.expected)
        *answers, beta = linears(u, *[m for m in maps if m is not None], self.beta)
        keys, gains, expected = (None if m is None else answers.pop(0) for m in maps)
        corrections = Corrections(
            keys=None if keys is None else keys.unflatten(-1, (H, n, -1)),
            expected=None if expected is None else split_heads(expected, H),
            gains=None if gains is None else gains.unflatten(-1, (H, n, -1)),
            beta=beta.unflatten(-1, (H, n)).sigmoid(),
            scale=self.scale,
            solver=self.solver,
            nonlinearity=self.nonlinearity,
        )
        return corrections, window
