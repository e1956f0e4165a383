"""Writes 2 … L of PRISM's `lm` layer: what is written, γ_l ⊙ β_l δ_l, and along which keys.

The residual r = v - e is reduced by the solver in engine/layer_ops.py. e, what the memory is expected to answer, and the
solver's gains are low-rank maps of the anchor u, a short convolution of the input. The keys are one of

    own          k_l = unit(W_l u)
    orthogonal   own keys without their part along k₁: these writes leave what k₁ reads untouched
    convolved    k_l = unit(silu(conv(W_l x))), as k₁ is made
    rotated      k_l = R_l k₁: each pair of channels (i, i + K/2) is turned by a learned angle, at first a right angle,
                 so that k_l starts orthogonal to k₁
    previous     k_l = k₁ of the token l - 1 places before, in the same document; nothing is written where there is none
    shared       k_l = k₁: all writes together have rank 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from prism.engine.layer_ops import Convolution, Corrections, plain_linear
from prism.engine.token import LowRankWeights, WritesWeights
from prism.rules.parts import (
    Carry,
    LowRank,
    ShortConv,
    fused_linears,
    is_plain_conv,
    l2_normalize,
    map_weights,
    split_heads,
    token_shift,
)
from prism.rules.parts.decays import spread
from prism.rules.rule import Span, check_nonnegative, set_initial_weights

KEYS = ("own", "orthogonal", "convolved", "rotated", "previous", "shared")
RESIDUALS = ("anchored", "value", "below")
SCALINGS = ("channel", "head", "fixed")


class ResidualWrites(nn.Module):
    """Writes 2 … L: low-rank maps of a separate anchor, and a learned scale γ that can start at zero.

    Args:
        rank: rank of the maps.
        key_rank: rank of the map to the keys; 0: a full linear map.
        up_std: initial standard deviation of the second halves of the maps to keys and gains; None: as other maps.
        step_scale: initial γ: one number, or two, between which heads are spread evenly in log.
        scaling: γ per `"channel"` or per `"head"`; `"fixed"`: γ stays `step_scale`.
        residual: e is a map of u (`"anchored"`), of what the next layer below with this option has read (`"below"`), or 0
            (`"value"`).
    """

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
        keys: str,
        rank: int,
        key_rank: int,
        up_std: float | None,
        step_scale: float | Sequence[float],
        scaling: str,
        conv_size: int,
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        check_scale(step_scale)
        if up_std is not None:
            check_nonnegative(up_std=up_std)
        if keys == "rotated" and key_dim % 2:
            raise ValueError(f"key_dim must be even for keys='rotated', got {key_dim}")
        self.heads, self.count = heads, steps - 1
        self.solver, self.nonlinearity, self.keys = solver, nonlinearity, keys
        channels, values = heads * key_dim * self.count, heads * value_dim
        self.conv = ShortConv(width, conv_size)
        self.key: nn.Module | None = None
        if keys in ("own", "orthogonal", "convolved"):
            full = key_rank == 0
            self.key = nn.Linear(width, channels, bias=False) if full else LowRank(width, channels, key_rank)
        self.key_conv = ShortConv(channels, conv_size) if keys == "convolved" else None
        self.angle = nn.Parameter(torch.empty(self.count, heads, key_dim // 2)) if keys == "rotated" else None
        self.gain = LowRank(width, values * self.count, rank) if gain else None
        self.expected = None if residual == "value" else LowRank(values if residual == "below" else width, values, rank)
        self.beta = nn.Linear(width, heads * self.count, bias=False)
        shape = (self.count, heads, 1 if scaling == "head" else value_dim)
        self.scale = None if scaling == "fixed" else nn.Parameter(torch.empty(shape))
        self.value_dim, self.below, self.layer_index = value_dim, residual == "below", layer_index
        self.step_scale, self.up_std = step_scale, up_std
        low_rank = {name: m for name, m in {"key": self.key, "gain": self.gain}.items() if isinstance(m, LowRank)}
        self.ups = {f"{name}.up.weight": tuple(m.up.weight.shape) for name, m in low_rank.items()}
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        values = {}
        if self.scale is not None:
            values["scale"] = self.first_scale().expand(self.scale.shape).clone()
        if self.angle is not None:
            values["angle"] = right_angles(*self.angle.shape)
        if self.up_std is not None:
            values |= {name: self.up_std * torch.randn(shape) for name, shape in self.ups.items()}
        return values

    def anchor(self, x: Tensor, carry: Carry, span: Span, u: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The anchor u of x `[B, T, width]`, computed here unless it is known, and what the next call needs."""
        window = carry.get("anchor")
        if u is not None:
            return u, {"anchor": self.conv.next_state(x, window, span)}
        u, following = self.conv(x, window, span)
        return u, {"anchor": following}

    def anchor_operands(self, x: Tensor, carry: Carry, span: Span) -> Convolution | None:
        """The anchor's convolution as an operand of `products`; None if `anchor` must compute it."""
        return self.conv.operands(x, carry.get("anchor"), span)

    def forward(self, x: Tensor, u: Tensor, carry: Carry, span: Span) -> tuple[Corrections, dict[str, Tensor]]:
        """x and its anchor u `[B, T, width]` → the corrections, and what the next call needs."""
        carried: dict[str, Tensor] = {}
        H, n = self.heads, self.count
        of_u = (None if self.key_conv is not None else self.key, self.gain, None if self.below else self.expected)
        *outputs, beta = fused_linears(u, *[m for m in of_u if m is not None], self.beta)
        keys, gains, expected = (None if m is None else outputs.pop(0) for m in of_u)
        if self.key_conv is not None and self.key is not None:
            keys, carried["key"] = self.key_conv(self.key(x), carry.get("key"), span)
        below = self._read_below(span)
        if self.expected is not None and below is not None:
            expected = self.expected(unit_rms(below).flatten(-2))
        corrections = Corrections(
            keys=None if keys is None else keys.unflatten(-1, (H, n, -1)),
            expected=None if expected is None else split_heads(expected, H),
            gains=None if gains is None else gains.unflatten(-1, (H, n, -1)),
            beta=beta.unflatten(-1, (H, n)).sigmoid(),
            scale=self.gamma(),
            solver=self.solver,
            nonlinearity=self.nonlinearity,
        )
        return corrections, carried

    def _read_below(self, span: Span) -> Tensor | None:
        """What the next layer below with residual="below" has read, `[B, T, H, V]`; None if e is something else, or there is
        none. Layers do not overwrite each other's: one that is computed again in the backward pass must find the same."""
        if not self.below or span.shared is None:
            return None
        names = map(read_name, reversed(range(self.layer_index)))
        found = next((span.shared[name] for name in names if name in span.shared), None)
        if found is not None and found.shape[2:] != (self.heads, self.value_dim):
            raise ValueError(
                f"residual='below' needs layers with equal heads: {self.heads} of {self.value_dim} values here, "
                f"{found.shape[2]} of {found.shape[3]} below; set another residual for one of them"
            )
        return found

    def first_scale(self) -> Tensor:
        """Initial γ `[H, 1]`."""
        ends = self.step_scale
        numbers = (
            spread(ends[0], ends[1], self.heads)
            if isinstance(ends, Sequence)
            else torch.full((self.heads,), float(ends))
        )
        return numbers.unsqueeze(-1)

    def gamma(self) -> Tensor:
        """γ `[L - 1, H, V]`."""
        shape = (self.count, self.heads, self.value_dim)
        if self.scale is None:
            with self.beta.weight.device:  # a copy to the device could not be captured in a CUDA graph
                return self.first_scale().expand(shape).contiguous()
        return self.scale if self.scale.shape == shape else self.scale.expand(shape).contiguous()

    def placed(self, k: Tensor, carry: Carry, span: Span) -> tuple[Tensor, dict[str, Tensor]]:
        """The unit keys k `[B, T, H, L, K]` with the later ones in their places, and what the next call needs."""
        if self.keys in ("own", "convolved", "shared"):
            return k, {}
        first, later = k[..., :1, :], k[..., 1:, :]
        carried: dict[str, Tensor] = {}
        if self.keys == "orthogonal":
            later = l2_normalize(later - (later * first).sum(-1, keepdim=True) * first)
        elif self.keys == "rotated" and self.angle is not None:
            later = rotate(first, self.angle.transpose(0, 1))
        else:
            key, places = first.flatten(2), []
            for back in range(1, self.count + 1):
                name = f"key{back}"
                key, carried[name] = token_shift(key, carry.get(name), span)
                places.append(key.view_as(first))
            later = torch.cat(places, 3)
        return torch.cat([first, later], 3), carried

    def decoding_weights(self) -> WritesWeights | None:
        """As `Rule.decoding_weights`, for these writes. Only own and shared keys, and an e of the anchor, have kernels."""
        if self.keys not in ("own", "shared") or self.below:
            return None
        maps = [m for m in (self.key, self.gain, self.expected) if m is not None]
        plans = {m: plan for m in maps if isinstance(plan := map_weights(m), LowRankWeights)}
        if len(plans) < len(maps) or not plain_linear(self.beta) or not is_plain_conv(self.conv):
            return None
        key, gain, expected = (None if m is None else plans[m] for m in (self.key, self.gain, self.expected))
        given = (self.conv.weight, key, gain, expected, self.beta.weight, self.gamma())
        return WritesWeights(*given, self.solver, self.nonlinearity)


def read_name(layer_index: int) -> str:
    """Where `Span.shared` has what a layer has read."""
    return f"prism read {layer_index}"


def check_scale(step_scale: float | Sequence[float]) -> None:
    """Raise a ValueError unless this is a number, or two above 0."""
    several = isinstance(step_scale, (list, tuple))
    numbers = step_scale if isinstance(step_scale, (list, tuple)) else (step_scale,)
    right = all(isinstance(n, Real) and math.isfinite(n) and (float(n) > 0 or not several) for n in numbers)
    if not right or len(numbers) != 1 + several:
        raise ValueError(f"step_scale must be a number, or two numbers above 0, got {step_scale!r}")


def unit_rms(x: Tensor, eps: float = 1e-5) -> Tensor:
    """x divided by the root of its mean square over the last dimension."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=eps)


def right_angles(count: int, heads: int, pairs: int) -> Tensor:
    """Angles `[count, H, K/2]` of ±π/2: every rotated key is orthogonal to the first. Their signs differ between the keys, so
    that those are hardly correlated."""
    place = torch.arange(pairs)
    signs = [torch.ones(pairs)] + [1.0 - 2.0 * ((place >> bit) & 1) for bit in range(count - 1)]
    return math.pi / 2 * torch.stack(signs).unsqueeze(1).repeat(1, heads, 1)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """x `[…, K]` with its pairs of channels (i, i + K/2) turned by `angle` `[…, K/2]`."""
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
