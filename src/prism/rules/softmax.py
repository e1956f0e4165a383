"""Softmax attention over the whole document or over a window: the memory is a cache of tokens.

    o_t = Σ_j softmax_j(q_tᵀ k_j · K^-½) v_j                                                     (Vaswani et al., 2017)

The output is a weighted mean of all values: the minimiser o of Σ_j e^{qᵀk_j} ‖o - v_j‖², computed separately for each query
(Nadaraya-Watson regression), where a linear memory fits one map for all queries. Rotary positions count from the start of
the document. Heads may share keys and values in groups (`kv_heads`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.engine.memories.attention import Attend
from prism.rules.parts import Carry, Rotary, ShortConv, split_heads, token_positions
from prism.rules.parts.norms import rms_norm
from prism.rules.rule import Objective, Paper, Rule, Span, check_integers, check_nonnegative, per_head


class Softmax(Rule):
    """Softmax attention over the whole document.

    Sees the whole document, and its state grows: `state_size` is the number of values that one token adds.

    Args:
        key_dim: size of a head's queries, keys and values; width / heads by default.
        kv_heads: number of heads of keys and values, a divisor of `heads`; as many as `heads` by default.
        rope_base: base of the rotary positions; None means no rotary positions.
        rope_dims: number of a head's first channels that are rotated, an even number; all by default.
        qk_norm: whether each head's queries and keys pass an RMSNorm.
        norm_eps: epsilon of this norm.
        gate: whether the output is multiplied by σ of a linear map of the input.
        conv_size: size of a short convolution (without an activation) on queries, keys and values, in tokens; 1 means no
            convolution.
    """

    name = "softmax"
    paper = Paper("Attention Is All You Need", "Vaswani et al. 2017", "https://arxiv.org/abs/1706.03762")
    objective = Objective("min_o Σ e^{qᵀk}‖o - v‖²")
    forgetting = "none"
    transition = "grows"
    forms = ("recurrent", "parallel")
    constant_state = False
    window: int | None = None
    shared_maps = ("gate", "out")
    query_first_maps = ("qkv",)

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        kv_heads: int | None = None,
        rope_base: float | None = 10000.0,
        rope_dims: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        gate: bool = False,
        conv_size: int = 1,
    ) -> None:
        key_dim = per_head(width, heads, key_dim)
        super().__init__(width, heads, key_dim, key_dim)
        check_nonnegative(norm_eps=norm_eps)
        kv_heads = heads if kv_heads is None else kv_heads
        if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads must be a divisor of the {heads} heads, got {kv_heads!r}")
        self.kv_heads = kv_heads
        self.state_size = 2 * kv_heads * key_dim
        self.sizes = [heads * key_dim, kv_heads * key_dim, kv_heads * key_dim]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = None if conv_size == 1 else ShortConv(sum(self.sizes), conv_size, activation=False)
        self.rope_dims = key_dim if rope_dims is None else rope_dims
        if not isinstance(self.rope_dims, int) or not 0 < self.rope_dims <= key_dim:
            raise ValueError(f"rope_dims must be from 2 to the head's {key_dim} channels, got {rope_dims!r}")
        self.rotary = None if rope_base is None else Rotary(self.rope_dims, rope_base)
        self.query_norm = nn.RMSNorm(key_dim, eps=norm_eps) if qk_norm else None
        self.key_norm = nn.RMSNorm(key_dim, eps=norm_eps) if qk_norm else None
        self.gate = nn.Linear(width, heads * key_dim, bias=False) if gate else None
        self.out = nn.Linear(heads * key_dim, width, bias=False)

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Attend, dict[str, Tensor], None]:
        mixed, following = self.qkv(x), dict[str, Tensor]()
        if self.conv is not None:
            mixed, following["conv"] = self.conv(mixed, carry.get("conv"), span)
        q, k, v = mixed.split(self.sizes, -1)
        q, k, v = split_heads(q, self.heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = rms_norm(self.query_norm, q), rms_norm(self.key_norm, k)
        if self.rotary is not None:
            positions, counted = token_positions(x, carry, span)
            following |= counted
            q, k = self._rotated(q, positions), self._rotated(k, positions)
        return Attend(q, k, v, self.window, span.reset, span.mask), following, None

    def _rotated(self, z: Tensor, positions: Tensor) -> Tensor:
        assert self.rotary is not None
        if self.rope_dims == self.key_dim:
            return self.rotary(z, positions)
        return torch.cat([self.rotary(z[..., : self.rope_dims], positions), z[..., self.rope_dims :]], -1)

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        o = o.flatten(-2)
        return self.out(o if self.gate is None else o * self.gate(x).sigmoid())


class SlidingWindow(Softmax):
    """Softmax attention over the last `window` tokens.

    A token sees itself and the window - 1 tokens before it; the state is a ring buffer of window - 1 tokens.

    Args:
        window: number of tokens that a token sees, itself included.
    """

    name = "sliding_window"
    paper = Paper("Longformer", "Beltagy et al. 2020", "https://arxiv.org/abs/2004.05150")
    forgetting = "after `window` tokens"
    transition = "shift"
    constant_state = True

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        window: int = 256,
        key_dim: int | None = None,
        kv_heads: int | None = None,
        rope_base: float | None = 10000.0,
        rope_dims: int | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        gate: bool = False,
        conv_size: int = 1,
    ) -> None:
        super().__init__(
            width,
            heads,
            key_dim=key_dim,
            kv_heads=kv_heads,
            rope_base=rope_base,
            rope_dims=rope_dims,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            gate=gate,
            conv_size=conv_size,
        )
        check_integers(window=window)
        self.window = window
        self.state_size *= window - 1
