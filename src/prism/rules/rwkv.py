"""What RWKV-6 and RWKV-7 share: token shift instead of a short convolution, a bonus for the token itself, a LayerNorm per
head and a gate on the answer, and starting values that depend on where in the stack a layer stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from prism.rules.initial import set_initial_weights
from prism.rules.norms import HeadLayerNorm
from prism.rules.parts import LowRank, split_heads
from prism.rules.rule import Rule, depth, per_head


class Own(NamedTuple):
    """What `output` needs of the token itself."""

    r: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    gate: Tensor  # [B, T, H·V]

    def bonus(self, weight: Tensor) -> Tensor:
        """(r · (weight ⊙ k)) v, weight `[H, K]` → `[B, T, H, V]`."""
        return (self.r * weight.to(self.r.dtype) * self.k).sum(-1, keepdim=True) * self.v


class RwkvFamily(Rule):
    """Shared: the four projections, a norm whose weight starts small in early layers, and `layer_index`, `layer_count`."""

    shared_maps = ("receptance", "gate", "out")

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int | None,
        value_dim: int | None,
        layer_index: int,
        layer_count: int,
    ) -> None:
        super().__init__(width, heads, per_head(width, heads, key_dim), per_head(width, heads, value_dim))
        self.depth = depth(layer_index, layer_count)
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.receptance = nn.Linear(width, keys, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, values, bias=False)
        self.norm = HeadLayerNorm(heads, self.value_dim, eps=64e-5)
        self.out = nn.Linear(values, width, bias=False)
        self.layer_index, self.layer_count = layer_index, layer_count

    def initial_weights(self) -> dict[str, Tensor]:
        share = ((1 + self.layer_index) / self.layer_count) ** 0.7
        return {"norm.norm.weight": torch.full((self.heads * self.value_dim,), share)}

    def heads_of(self, *flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(split_heads(z, self.heads) for z in flat)


class ConstantStart(LowRank):
    """A low-rank map that starts as a constant: the first map is zero, the second a tenth of an orthogonal one."""

    def __init__(
        self, width: int, out: int, rank: int, activation: Callable[[Tensor], Tensor] | None = None, bias: bool = True
    ) -> None:
        super().__init__(width, out, rank, bias, activation)
        self.sizes = (width, out, rank)
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        width, out, rank = self.sizes
        up = nn.init.orthogonal_(torch.empty(out, rank), gain=0.1 * max(1.0, math.sqrt(rank / out)))
        return {"down.weight": torch.zeros(rank, width), "up.weight": up}
