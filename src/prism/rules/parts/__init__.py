"""Building blocks of rules: short convolutions, token shift, low-rank and block-diagonal maps, rotary positions.

Norms are in norms.py, forget gates in decays.py, angles that the data chooses in angles.py. Parts that look back return the
state that the next call needs, which the rule stores in its `carry`. They reset where documents start and skip padding (see
`Span` in rule.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.compat import is_unmodified
from prism.engine.layer_ops import UNIT_EPS as UNIT_EPS
from prism.engine.layer_ops import Convolution, history, plain_linear, products, products_serve, short_conv, widened
from prism.engine.layer_ops import l2_normalize as l2_normalize
from prism.engine.token import LowRankWeights
from prism.rules.rule import Carry, Span, set_initial_weights, uniform


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision; otherwise x."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def fused_linears(x: Tensor, *maps: nn.Module) -> list[Tensor]:
    """The outputs of several linear maps of x, computed as one product where possible.

    Plain linear maps, and the first halves of low-rank maps, are fused: separately, many maps with few outputs would each
    read x, and each add to its gradient. If one was replaced, hooked or quantised, every map is called as a module instead.
    """
    weight = _joined_weight(maps)
    return [m(x) for m in maps] if weight is None else _outputs(F.linear(x, weight), maps)


def linear_groups(
    x: Tensor, *groups: tuple[nn.Module, ...], conv: Convolution | None = None
) -> tuple[list[list[Tensor]], Tensor, Tensor | None] | None:
    """`fused_linears` of several groups of maps, one product each, x for all else that reads it, and its convolution: the
    products sum the gradient of x (`products` in layer_ops.py).

    None if the products cannot do that here, or a map was replaced, hooked or quantised: call `fused_linears` then.
    """
    if not products_serve(x):
        return None
    weights = [weight for group in groups if (weight := _joined_weight(group)) is not None]
    if len(weights) < len(groups):
        return None
    found, x, convolved = products(x, *weights, conv=conv)
    return [_outputs(y, group) for y, group in zip(found, groups, strict=True)], x, convolved


def _joined_weight(maps: tuple[nn.Module, ...]) -> Tensor | None:
    """The weights of linear maps, and of low-rank maps' first halves, one below the other; None if one is not plain."""
    firsts = [m.down if type(m) is LowRank and is_unmodified(m) else m for m in maps]
    plain = [m for m in firsts if isinstance(m, nn.Linear) and plain_linear(m)]
    if len(plain) < len(maps) or len({(m.weight.dtype, m.weight.device) for m in plain}) > 1:
        return None
    spare = -sum(m.out_features for m in plain) % 8  # padding: a GPU's matrix units want rows of 16 bytes
    if len(plain) == 1 and not spare:
        return plain[0].weight
    return torch.cat([*[m.weight for m in plain], plain[0].weight.new_zeros(spare, plain[0].in_features)])


def _outputs(y: Tensor, maps: tuple[nn.Module, ...]) -> list[Tensor]:
    """Each map's outputs, from the product with `_joined_weight(maps)`."""
    firsts = [m.down if isinstance(m, LowRank) else m for m in maps]
    sizes = [m.out_features for m in firsts if isinstance(m, nn.Linear)]
    seconds = _second_halves(maps)
    if seconds is not None:
        return widened(y, sizes, seconds)
    spare = y.shape[-1] - sum(sizes)
    outputs = y.split([*sizes, *[spare] * (spare > 0)], -1) if y.shape[-1] > sizes[0] else [y]
    return [m.widen(z) if isinstance(m, LowRank) else z for m, z in zip(maps, outputs, strict=False)]


def _second_halves(maps: tuple[nn.Module, ...]) -> list[Tensor | None] | None:
    """The weights of low-rank maps' second halves, and None for linear maps; None if there are no low-rank maps, or a second
    half is not a plain product."""
    found: list[Tensor | None] = []
    for m in maps:
        plan = map_weights(m) if isinstance(m, LowRank) else None
        if isinstance(m, LowRank) and (not isinstance(plan, LowRankWeights) or plan.bias is not None):
            return None
        found.append(plan.up if isinstance(plan, LowRankWeights) else None)
    return found if any(w is not None for w in found) else None


def map_weights(m: nn.Module | None) -> Tensor | LowRankWeights | None:
    """The weight of a plain linear map, or the weights of a low-rank one's halves; None if m is anything else.

    A low-rank map may have a bias, and no non-linearity in between.
    """
    if isinstance(m, nn.Linear) and plain_linear(m):
        return m.weight
    if type(m) is not LowRank or m.activation is not None or not plain_linear(m.down):
        return None
    if type(m.up) is not nn.Linear or type(m.up.weight) not in (Tensor, nn.Parameter) or not is_unmodified(m.up):
        return None
    return LowRankWeights(m.down.weight, m.up.weight, m.up.bias)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H·K]` → `[B, T, H, K]`."""
    return x.unflatten(-1, (heads, -1))


def with_normaliser(v: Tensor) -> Tensor:
    """`[…, V]` → `[…, V + 1]`: append a column of ones, which reads Σ w, the divisor of the other columns' Σ w v."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


class ShortConv(nn.Module):
    """Causal depthwise convolution over the last `size` tokens, then SiLU (unless `activation=False`).

    `[B, T, D]` → `[B, T, D]`, and the conv state for the next call: the last `size - 1` tokens, `[B, size - 1, D]`. Size 1
    means no convolution: the token itself, and an empty conv state.
    """

    def __init__(self, width: int, size: int = 4, bias: bool = False, activation: bool = True) -> None:
        super().__init__()
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"conv_size must be an integer ≥ 1 (1: no convolution), got {size!r}")
        bound = 1 / math.sqrt(size)
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, width).uniform_(-bound, bound)) if size > 1 else None
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if bias else None
        self.activation = activation

    def forward(self, x: Tensor, conv_state: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
        following = self.next_state(x, conv_state, span)
        if self.weight is None:
            y = x if self.bias is None else x + self.bias.to(x.dtype)
            y = F.silu(y) if self.activation else y
        else:
            if span.context is not None and x.shape[1] < self.size - 1:
                raise ValueError(
                    f"this part of the sequence has {x.shape[1]} tokens, but a convolution reaches back {self.size - 1}: "
                    "cut it into fewer parts"
                )
            conv_state = span.previous(following, conv_state)
            y = short_conv(x, self.weight, self.bias, conv_state, span.documents, self.activation)
        return y, following

    def operands(self, x: Tensor, conv_state: Tensor | None, span: Span) -> Convolution | None:
        """This convolution as an operand of `products`; None if `forward` must compute it."""
        learned = conv_state is not None and conv_state.requires_grad and torch.is_grad_enabled()
        if self.weight is None or not is_plain_conv(self) or not is_unmodified(self):
            return None
        if learned or span.context is not None:
            return None
        documents = None if span.documents is None else span.documents.int()
        return Convolution(self.weight, None if conv_state is None else conv_state.to(x.dtype), documents)

    def next_state(self, x: Tensor, conv_state: Tensor | None, span: Span) -> Tensor:
        """The last `size - 1` real tokens of the current document, zeros before it."""
        count, T, documents = self.size - 1, x.shape[1], span.documents
        if span.mask is None and count <= T:  # without a copy of all tokens
            seen, numbers = x[:, T - count :], None if documents is None else documents[:, T - count :]
        else:
            seen = history(x, conv_state, count)
            numbers = None if documents is None else F.pad(documents, (count, 0))
        if documents is not None and numbers is not None:  # the next call must not see earlier documents either
            seen = torch.where((numbers == documents[:, -1:]).unsqueeze(-1), seen, 0.0)
        return span.last(seen, count)


def recall_taps(size: int, heads: int, sizes: Sequence[int], noise: float = 0.3) -> Tensor:
    """Initial taps `[size, channels]` of queries, keys and values, of which there are `sizes` channels, for start="recall".

    Each channel sees its token, and keys of the second half of the heads the token before; `noise` is the scale of what is
    drawn on top, as a part of what other convolutions draw.
    """
    queries, keys, _ = sizes
    back = torch.zeros(sum(sizes), dtype=torch.long)
    of_heads = back[queries : queries + keys].view(-1, heads, queries // heads)  # for each step of a token
    of_heads[:, heads // 2 :] = 1
    taps = noise * uniform((size, len(back)), size**-0.5)
    taps[size - 1 - back, torch.arange(len(back))] += 1.0
    return taps


def is_plain_conv(m: nn.Module) -> bool:
    """Whether m is a convolution with SiLU and without a bias."""
    return type(m) is ShortConv and m.bias is None and m.activation


def token_shift(x: Tensor, last: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
    """Each token's predecessor `[B, T, D]` (zero where a document starts), and the last real token `[B, 1, D]`.

    `last` `[B, 1, D]` is the token before the span.
    """
    seen = history(x, last, 1)
    following = span.last(seen, 1)
    if span.context is not None:
        seen = history(x, span.previous(following, last), 1)
    previous = seen[:, :-1]
    if span.reset is not None:
        previous = torch.where(span.reset.unsqueeze(-1), 0.0, previous)
    return previous, following


def fewest_tokens(rule: nn.Module) -> int:
    """The fewest tokens that each part of a sequence must have if it is cut: as many as the rule's convolutions reach back."""
    return max((part.size - 1 for part in rule.modules() if isinstance(part, ShortConv)), default=1) or 1


class LowRank(nn.Module):
    """A low-rank map `[…, width]` → `[…, rank]` → `[…, out]`, with an optional non-linearity between the two."""

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
            raise ValueError(f"the rank of a low-rank map must be an integer ≥ 1, got {rank!r}")
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.widen(self.down(x))

    def widen(self, h: Tensor) -> Tensor:
        """The second half: `[…, rank]` → `[…, out]`."""
        return self.up(h if self.activation is None else self.activation(h))


def token_positions(x: Tensor, carry: Carry, span: Span) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token's position in its document `[B, T]`, and the carry from which the next call continues to count."""
    start = carry.get("position")
    start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if start is None else start
    positions, following = span.positions(x.shape[1], start)
    return positions, {"position": following}


class BlockLinear(nn.Module):
    """A block-diagonal map `[…, width]` → `[…, width]`: each group of channels is mapped separately."""

    def __init__(self, width: int, blocks: int, bias: bool = False) -> None:
        super().__init__()
        if width % blocks:
            raise ValueError(f"a block-diagonal map of {width} channels cannot have {blocks} equal blocks")
        size = width // blocks
        self.blocks = blocks
        self.weight = nn.Parameter(torch.empty(width, size))  # [block · out, in], one block after the other
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


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of channels of x `[…, K]` by angles with these cosines and sines `[…, K/2]`; pairs as in `Rotary`."""
    if interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Rotary(nn.Module):
    """Rotary positions: rotates pairs of channels by position · frequency. Pairs are (i, i + K/2), or with `interleaved`
    (0, 1), (2, 3) …"""

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
        # Computed on the device: a copy from the host could not be captured in a CUDA graph.
        frequencies = self.base ** -(torch.arange(self.pairs, dtype=torch.float64, device=x.device) / self.last)
        angle = positions.double()[:, :, None, None] * frequencies
        return rotate_pairs(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype), self.interleaved)
