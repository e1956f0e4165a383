"""What rules are built from: short convolutions, token shift, low-rank and block-diagonal maps, rotary positions.

Norms are in norms.py, gates that forget in decays.py. Parts that look back keep their window in the caller's `carry`
under a name of their own, restart at documents and step over padding (see span.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.compat import is_unmodified
from prism.engine.fused import UNIT_EPS as UNIT_EPS
from prism.engine.fused import history, short_conv
from prism.engine.fused import l2_normalize as l2_normalize
from prism.rules.rule import Carry, Span, set_initial_weights


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32, anything else stays."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def linears(x: Tensor, *maps: nn.Module) -> list[Tensor]:
    """Each map's answer to x. Plain ones, and low-rank ones down to their rank, are one product: many maps of few outputs
    would each read x, and each add to its gradient. If one was replaced, hooked or quantised, all are called as they are."""
    firsts = [m.down if type(m) is LowRank and is_unmodified(m) else m for m in maps]
    plain = [m for m in firsts if isinstance(m, nn.Linear) and _plain(m)]
    if len(plain) < len(maps) or len({(m.weight.dtype, m.weight.device) for m in plain}) > 1:
        return [m(x) for m in maps]
    sizes = [m.out_features for m in plain]
    spare = -sum(sizes) % 8  # a GPU's matrix units want rows of 16 bytes
    zeros = plain[0].weight.new_zeros(spare, x.shape[-1])
    *answers, _ = F.linear(x, torch.cat([*[m.weight for m in plain], zeros])).split([*sizes, spare], -1)
    return [m.widen(y) if isinstance(m, LowRank) else y for m, y in zip(maps, answers, strict=True)]


def _plain(m: nn.Linear) -> bool:
    """Whether m's answer is x Wᵀ, and W a tensor like any other: quantised and sharded ones are classes of their own."""
    return type(m) is nn.Linear and m.bias is None and type(m.weight) in (Tensor, nn.Parameter) and is_unmodified(m)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H·K]` → `[B, T, H, K]`."""
    return x.unflatten(-1, (heads, -1))


def with_normaliser(v: Tensor) -> Tensor:
    """`[…, V]` → `[…, V + 1]`: a column of ones, whose answer Σ w is what the others' Σ w v is divided by."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


class ShortConv(nn.Module):
    """Causal depthwise convolution over the last `size` tokens, then SiLU (unless `activation=False`).

    `[B, T, D]` → `[B, T, D]`, and the window of `size - 1` tokens that the next segment needs. Size 1 means no
    convolution: the token itself, and a window of no tokens.
    """

    def __init__(self, width: int, size: int = 4, bias: bool = False, activation: bool = True) -> None:
        super().__init__()
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"conv_size must be a whole number ≥ 1 (1: no convolution), got {size!r}")
        bound = 1 / math.sqrt(size)
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, width).uniform_(-bound, bound)) if size > 1 else None
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if bias else None
        self.activation = activation

    def forward(self, x: Tensor, window: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        if self.weight is None:
            y = x if self.bias is None else x + self.bias.to(x.dtype)
            y = F.silu(y) if self.activation else y
        else:
            y = short_conv(x, self.weight, self.bias, window, span.documents, self.activation)
        return y, self._window(x, window, span)

    def _window(self, x: Tensor, window: Tensor | None, span: Span) -> Tensor:
        count, T, documents = self.size - 1, x.shape[1], span.documents
        if span.mask is None and count <= T:  # without a copy of all tokens
            seen, numbers = x[:, T - count :], None if documents is None else documents[:, T - count :]
        else:
            seen = history(x, window, count)
            numbers = None if documents is None else F.pad(documents, (count, 0))
        if documents is not None and numbers is not None:  # the next segment's taps may not reach into these either
            seen = torch.where((numbers == documents[:, -1:]).unsqueeze(-1), seen, 0.0)
        return span.last(seen, count)


def shift(x: Tensor, last: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
    """The token before each token (zero at the start of a document), and the last real one. `last` is `[B, 1, D]`."""
    seen = history(x, last, 1)
    previous = seen[:, :-1]
    if span.reset is not None:
        previous = torch.where(span.reset.unsqueeze(-1), 0.0, previous)
    return previous, span.last(seen, 1)


class LowRank(nn.Module):
    """`[…, width]` → `[…, out]` through `rank` numbers, with an optional non-linearity between."""

    def __init__(
        self,
        width: int,
        out: int,
        rank: int,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"the rank of a low-rank map must be a whole number ≥ 1, got {rank!r}")
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(self.down(x))

    def widen(self, h: Tensor) -> Tensor:
        """`[…, rank]` → `[…, out]`."""
        return self.up(h if self.activation is None else self.activation(h))


def place(x: Tensor, carry: Carry, span: Span) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token's place in its document `[B, T]`, and the carry that lets the next segment go on counting."""
    start = carry.get("position")
    start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if start is None else start
    positions, following = span.positions(x.shape[1], start)
    return positions, {"position": following}


class BlockLinear(nn.Module):
    """`[…, width]` → `[…, width]` by a matrix of blocks along the diagonal: each group of channels is mapped by itself."""

    def __init__(self, width: int, blocks: int, bias: bool = False) -> None:
        super().__init__()
        if width % blocks:
            raise ValueError(f"a block-diagonal map of {width} channels cannot have {blocks} equal blocks")
        size = width // blocks
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(width, size))  # [block · out, in], block under block
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        width, size = self.weight.shape
        weights = {"weight": torch.randn(width, size) / math.sqrt(size)}
        return weights if self.bias is None else {**weights, "bias": torch.zeros(width)}

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.weight.unflatten(0, (self.blocks, -1))
        y = torch.einsum("...ni,noi->...no", x.unflatten(-1, (self.blocks, -1)), blocks).flatten(-2)
        return y if self.bias is None else y + self.bias


class Rotary(nn.Module):
    """Rotates pairs of key channels by position · frequency. `interleaved`: pairs (0,1), (2,3) …; else (i, i + K/2)."""

    def __init__(self, key_dim: int, base: float = 10000.0, endpoint: bool = False, interleaved: bool = False) -> None:
        super().__init__()
        if key_dim % 2:
            raise ValueError(f"key_dim must be even for rotary positions, got {key_dim}")
        pairs = key_dim // 2
        # RetNet spaces its angles over [0, 1] with the end point, RoPE without it.
        self.pairs, self.last = pairs, max(1, pairs - 1) if endpoint else pairs
        self.base, self.interleaved = base, interleaved

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`[B, T, H, K]`, `[B, T]` → `[B, T, H, K]`. Angles in float64: position 1,000,000 must not lose its phase."""
        # Made on the device: a copy from the host could not be captured in a CUDA graph.
        frequencies = self.base ** -(torch.arange(self.pairs, dtype=torch.float64, device=x.device) / self.last)
        angle = positions.double()[:, :, None, None] * frequencies
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        if self.interleaved:
            a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
