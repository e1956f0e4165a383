"""The writes that an adapter adds to one Gated DeltaNet layer, kept in a memory of their own.

The base layer's memory is S_t = α_t (I - β₁ k₁ k₁ᵀ) S_{t-1} + β₁ k₁ vᵀ. PRISM writes more at every token:

    S_t = α_t (I - β₁ k₁ k₁ᵀ) S_{t-1} + β₁ k₁ vᵀ + Σ_{l ≥ 2} β_l k_l δ_lᵀ

This is linear in S and in the writes. So S = S' + S'': the base layer computes S' with its first write, as before, and the
branch computes

    S''_t = α_t (I - β₁ k₁ k₁ᵀ) S''_{t-1} + Σ_{l ≥ 2} β_l k_l δ_lᵀ          Sᵀq = S'ᵀq + S''ᵀq

with the base layer's α, β₁, k₁ and q. That is exact up to rounding, and it has three advantages over one memory with all
writes. The base layer computes what it computed before, by its own functions: with γ = 0 the branch adds exact zeros. A cache
holds the base's state unchanged, so that an adapter can be disabled, or replaced by another, without traces in it. And any
number of adapters add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.layer_ops import l2_normalize, solved_writes
from prism.rules.parts import Carry
from prism.rules.parts.writes import ResidualWrites
from prism.rules.rule import Span

if TYPE_CHECKING:
    from prism.hf.adapters.config import PrismAdapterConfig

ANCHOR = "anchor"
"""Name of the only thing that a branch carries from call to call besides its memory: the window of its convolution."""


class Sizes(NamedTuple):
    """The sizes of a Gated DeltaNet layer that its adapter depends on."""

    width: int
    heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.heads} heads of {self.key_dim} × {self.value_dim}"


class First(NamedTuple):
    """What the base layer does at every token: its query, its first write and its forgetting."""

    q: Tensor  # [B, T, H, K], scaled
    k: Tensor  # [B, T, H, K], unit vectors
    v: Tensor  # [B, T, H, V]
    beta: Tensor  # [B, T, H]
    log_decay: Tensor  # [B, T, H]


class Branch(nn.Module):
    """Writes 2 … L of one adapter in one layer, from the layer's input. γ starts at zero."""

    def __init__(self, sizes: Sizes, config: PrismAdapterConfig) -> None:
        super().__init__()
        self.writes = ResidualWrites(
            *sizes,
            steps=config.steps,
            solver=config.solver,
            residual=config.residual,
            gain=True,
            nonlinearity=True,
            keys=config.keys,
            rank=config.rank,
            key_rank=config.rank,
            up_std=None,
            step_scale=0.0,
            scaling=config.scaling,
            conv_size=config.conv_size,
        )

    def update(self, x: Tensor, first: First, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor]]:
        """The update of the branch's memory for x `[B, T, width]`, and its carry."""
        dtype = self.writes.beta.weight.dtype
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(dtype)  # adapters of half-precision models are float32
        u, anchored = self.writes.anchor(x, carry, span)
        c, carried = self.writes(x, u, carry, span)
        k = first.k.unsqueeze(3)
        later = k.expand(-1, -1, -1, c.beta.shape[-1], -1) if c.keys is None else l2_normalize(c.keys).to(k.dtype)
        later = self.writes.placed(torch.cat([k, later], 3), carry, span)[0][..., 1:, :]
        w = solved_writes(first.v.to(x.dtype), c.expected, c.gains, c.beta, c.scale, c.solver, c.nonlinearity)
        update = Update(
            first.q,
            later,
            w.to(first.q.dtype),
            first.log_decay,
            erase_key=first.k,
            erase_strength=first.beta,
            reset=span.reset,
            mask=span.mask,
        )
        return update, {**anchored, **carried}

    def empty_carry(self, x: Tensor) -> dict[str, Tensor]:
        """The carry before the first token of x `[B, T, width]`."""
        conv = self.writes.conv
        dtype = x.dtype if torch.is_autocast_enabled(x.device.type) else self.writes.beta.weight.dtype
        return {ANCHOR: x.new_zeros(x.shape[0], conv.size - 1, x.shape[-1], dtype=dtype)}
