"""Base of the Hebbian rules: after a decay, a token adds its value along its key, without reading the memory.

    S_t = Diag(decay_t) S_{t-1} + k_t v_tᵀ          o_t = S_tᵀ q_t

One gradient step on -⟨Sᵀk, v⟩ with weight decay. The rules differ in how they forget (not at all, per head, per channel;
constant or from the data), in how they transform q, k and v, and in how they normalise the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.rules.parts import Carry, ShortConv, split_heads
from prism.rules.rule import Rule, Span


class Projections(NamedTuple):
    """What a Hebbian rule computes from the input. `extra` is passed to `output`."""

    q: Tensor  # [B, T, G, K]
    k: Tensor  # [B, T, G, K]
    v: Tensor  # [B, T, H, V]
    carry: dict[str, Tensor]
    log_decay: Tensor | None = None  # [B, T, H] or [B, T, H, K]
    extra: Any = None


class HebbianFamily(Rule):
    """Base of all rules that only decay and add. Subclasses extend `project` and set `norm` and `gate`.

    q, k and v come from one projection, an optional short convolution (size 1: none) and, with `activation`, SiLU. The heads
    of a group share q and k; by default every head is a group.
    """

    norm: nn.Module
    shared_maps = ("gate", "out")
    query_first_maps = ("qkv",)

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        conv_size: int,
        conv_bias: bool = False,
        activation: bool,
        groups: int | None = None,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim)
        if groups is not None and (not isinstance(groups, int) or groups < 1 or heads % groups):
            raise ValueError(f"groups must be an integer that divides heads = {heads}, got {groups!r}")
        self.groups = heads if groups is None else groups
        keys, values = self.groups * key_dim, heads * value_dim
        self.sizes = [keys, keys, values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size, conv_bias, activation)
        self.gate: nn.Module | None = None
        self.out = nn.Linear(values, width, bias=False)

    @property
    def query_size(self) -> int:
        return self.groups * self.key_dim

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        """x `[B, T, width]` → q, k, v, the carry and the log-decay."""
        mixed, conv_state = self.conv(self.qkv(x), carry.get("conv"), span)
        q, k, v = mixed.split(self.sizes, -1)
        G, H = self.groups, self.heads
        return Projections(split_heads(q, G), split_heads(k, G), split_heads(v, H), {"conv": conv_state})

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Any, dict[str, Tensor], Any]:
        p = self.project(x, carry, span)
        update = Update(p.q, p.k.unsqueeze(3), p.v.unsqueeze(3), p.log_decay, reset=span.reset, mask=span.mask)
        return update, p.carry, p.extra

    def output(self, o: Tensor, x: Tensor, extra: Any) -> Tensor:
        return self.out(self.norm(o, None if self.gate is None else self.activate(self.gate(x))))

    def activate(self, gate: Tensor) -> Tensor:
        """The activation of the output gate."""
        return F.silu(gate)
