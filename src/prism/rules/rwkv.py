"""RWKV-6 and RWKV-7: linear memories with a decay per key channel and token shift.

    RWKV-6   S_t = Diag(w_t) S_{t-1} + k_t v_tᵀ          o_t = (S_{t-1} + (u ⊙ k_t) v_tᵀ)ᵀ r_t      (Peng et al., 2024)
    RWKV-7   S_t = (Diag(w_t) - (a ⊙ κ̂) κ̂ᵀ) S_{t-1} + k̃ ṽᵀ          o_t = S_tᵀ r_t                  (Peng et al., 2025)

Both use token shift instead of a short convolution, add a bonus for the current token, put a LayerNorm per head and a gate
on the output, and have initial values that depend on the layer's position in the stack.

Token shift: every projection i sees its own mixture of a token and the one before it,

    x_i = x_t + (x_{t-1} - x_t) ⊙ μ_i

RWKV-7 learns the μ_i; RWKV-6 adds to each a low-rank function of the input. Both start from a ramp over the channels,
1 - (c/D)^{p (1 - ℓ/Λ)}: early channels look back most, late layers less than early ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.rules.parts import Carry, LowRank, at_least_float32, l2_normalize, split_heads, token_shift
from prism.rules.parts.norms import HeadLayerNorm
from prism.rules.rule import (
    DECAYED_CORRELATION,
    GENERALISED_REGRESSION,
    Paper,
    Rule,
    Span,
    depth,
    per_head,
    set_initial_weights,
    uniform,
)


def ramp(size: int) -> Tensor:
    """`[size]`, rising evenly from 0 to 1."""
    return torch.arange(size) / max(1, size - 1)


def mixtures(width: int, powers: list[float], layer_index: int, layer_count: int) -> Tensor:
    """The initial μ, one row for each power, `[n, D]`."""
    fraction = torch.arange(width) / width
    return torch.stack([1 - fraction ** (p * (1 - layer_index / layer_count)) for p in powers])


class TokenMix(nn.Module):
    """n learned mixtures of a token and its predecessor."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(count, width))  # the rule initialises it

    def forward(self, x: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
        """Tokens x and their predecessors, each `[B, T, D]` → n tensors `[B, T, D]`."""
        return _mix(x, previous - x, self.mu)


class DynamicTokenMix(TokenMix):
    """Mixtures that also depend on the token: μ_i + tanh(x_0 W)U_i, where x_0 is itself a learned mixture."""

    def __init__(self, count: int, width: int, rank: int) -> None:
        super().__init__(count, width)
        self.first = nn.Parameter(torch.empty(width))  # the μ of x_0; the rule initialises it
        self.down = nn.Linear(width, count * rank, bias=False)
        self.up = nn.Parameter(torch.empty(count, rank, width))
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        count, rank, width = self.up.shape
        return {"down.weight": torch.zeros(count * rank, width), "up": uniform((count, rank, width), 0.01)}

    def forward(self, x: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
        difference = previous - x
        (x_0,) = _mix(x, difference, self.first.unsqueeze(0))
        hidden = self.down(x_0).tanh().unflatten(-1, (len(self.mu), -1))
        return _mix(x, difference, self.mu + torch.einsum("btnr,nrd->btnd", hidden, self.up.to(x.dtype)))


def _mix(x: Tensor, difference: Tensor, mu: Tensor) -> tuple[Tensor, ...]:
    """x and predecessor minus x, each `[B, T, D]`, μ `[…, n, D]` → n tensors `[B, T, D]` in x's dtype."""
    return (x.unsqueeze(2) + difference.unsqueeze(2) * mu.to(x.dtype)).unbind(2)


class CurrentToken(NamedTuple):
    """What `output` needs from `update`, for the bonus of the current token and the gate."""

    r: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    gate: Tensor  # [B, T, H·V]

    def bonus(self, weight: Tensor) -> Tensor:
        """(r · (weight ⊙ k)) v, weight `[H, K]` → `[B, T, H, V]`."""
        return (self.r * weight.to(self.r.dtype) * self.k).sum(-1, keepdim=True) * self.v


class RwkvFamily(Rule):
    """Base of RWKV-6 and RWKV-7: receptance, key, value and output maps, and a norm whose weight starts small in early
    layers."""

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
        scale = ((1 + self.layer_index) / self.layer_count) ** 0.7
        return {"norm.norm.weight": torch.full((self.heads * self.value_dim,), scale)}

    def heads_of(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Each `[B, T, H·K]` → `[B, T, H, K]`."""
        return tuple(split_heads(z, self.heads) for z in flat)


class ConstantStart(LowRank):
    """A low-rank map whose initial output is constant: `down` starts at zero, `up` as 0.1 times an orthogonal matrix."""

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


class Rwkv6(RwkvFamily):
    """RWKV-6 (Finch): linear attention with a decay per key channel, read before it is written.

    The current token enters the output with a learned weight u instead of the 1 it is written with. The decay is
    w = exp(-exp(w₀ + low-rank)). How much of the previous token each projection sees depends on the data.

    Args:
        mix_rank: rank of the maps that decide how much each projection sees of the previous token.
        decay_rank: rank of the map to the decay.
    """

    name = "rwkv6"
    paper = Paper("Eagle and Finch", "Peng et al. 2024", "https://arxiv.org/abs/2404.05892")
    objective = DECAYED_CORRELATION
    forgetting = "per channel"
    transition = "diagonal"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        layer_index: int = 0,
        layer_count: int = 1,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, layer_index, layer_count)
        self.mix = DynamicTokenMix(5, width, mix_rank)
        self.decay_in = ConstantStart(width, heads * self.key_dim, decay_rank, torch.tanh)
        self.bonus = nn.Parameter(torch.empty(heads, self.key_dim))
        set_initial_weights(self)
        self.gate = nn.Linear(width, heads * self.value_dim, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        keys, channels = self.heads * self.key_dim, ramp(self.heads * self.key_dim)
        powers = [0.5, 1, 1, 1, 0.5, 1]  # r, w, k, v, g and x_0
        mix = mixtures(self.width, powers, self.layer_index, self.layer_count)
        mix[3] -= 0.3 * self.depth
        zigzag = ((torch.arange(keys) + 1) % 3 - 1) * 0.1
        return {
            **super().initial_weights(),
            "mix.mu": mix[:5],
            "mix.first": mix[5],
            "decay_in.up.weight": uniform((keys, self.decay_in.sizes[-1]), 0.01),
            "decay_in.up.bias": -6 + 5 * channels ** (0.7 + 1.3 * self.depth),
            "bonus": (self.depth * (1 - channels) + zigzag).view(self.heads, -1),
        }

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], CurrentToken]:
        previous, last = token_shift(x, carry.get("shift"), span)
        xr, xw, xk, xv, xg = self.mix(x, previous)
        r, k, v = self.heads_of(self.receptance(xr), self.key(xk), self.value(xv))
        (log_decay,) = self.heads_of(-at_least_float32(self.decay_in(xw)).exp())
        update = Update(r, k.unsqueeze(3), v.unsqueeze(3), log_decay, read="before", reset=span.reset, mask=span.mask)
        return update, {"shift": last}, CurrentToken(r, k, v, F.silu(self.gate(xg)))

    def output(self, o: Tensor, x: Tensor, extra: CurrentToken) -> Tensor:
        return self.out(self.norm(o + extra.bonus(self.bonus)) * extra.gate)


class Rwkv7(RwkvFamily):
    """RWKV-7 (Goose): a decay per key channel, and an erase along a separate key from the *undecayed* state.

    κ̂ = nrm(k ⊙ k_k) is the key that is looked up, a ⊙ κ̂ the key that is erased: a step size per channel.
    k̃ = k ⊙ (1 + (a - 1) ⊙ k_a) is written. With w = exp(-e^{-½} σ(·)) in (.545, 1) the eigenvalue along κ̂ is about w - a,
    which can be mildly negative. The bonus (r·(r_k ⊙ k̃)) v for the current token is added after the norm.

    Layers above the first mix their value with the first layer's, which they receive through `Span.shared`. Without it (a
    single mixer) a layer uses its own value. The ranks of the low-rank maps follow from the width.
    """

    name = "rwkv7"
    paper = Paper("RWKV-7 Goose", "Peng et al. 2025", "https://arxiv.org/abs/2503.14456")
    objective = GENERALISED_REGRESSION
    forgetting = "per channel, and along a key"
    transition = "diagonal + rank 1"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        layer_index: int = 0,
        layer_count: int = 1,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, layer_index, layer_count)
        K, keys, values = self.key_dim, heads * self.key_dim, heads * self.value_dim
        self.mix = TokenMix(6, width)
        self.decay_in = ConstantStart(width, keys, _rank(width, 2.5), torch.tanh)
        self.rate = ConstantStart(width, keys, _rank(width, 2.5))
        self.value_mix = ConstantStart(width, values, _rank(width, 1.7)) if layer_index > 0 else None
        self.gate = ConstantStart(width, values, _rank(width, 5), torch.sigmoid, bias=False)
        self.erase_scale = nn.Parameter(torch.empty(keys))
        self.rate_scale = nn.Parameter(torch.empty(keys))
        self.bonus = nn.Parameter(torch.empty(heads, K))
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        heads, width, root = self.heads, self.width, math.sqrt(self.width)
        keys, values = heads * self.key_dim, heads * self.value_dim
        powers = [0.2, 0.9, 0.7, 0.7, 0.9, 0.2]  # r, w, k, v, a, g
        line, zigzag = ramp(keys) - 0.5, (2 * ramp(self.key_dim) - 1).repeat(heads)
        zigzag = zigzag * zigzag.abs()
        weights = {
            **super().initial_weights(),
            "mix.mu": mixtures(width, powers, self.layer_index, self.layer_count),
            "decay_in.up.bias": -5.5 + 6 * ramp(keys) ** (1 + self.depth**0.3) + 2.5 * zigzag,
            "rate.up.bias": -0.19 + 0.3 * zigzag + 0.4 * line,
            "erase_scale": 0.71 - 0.1 * line,
            "rate_scale": torch.full((keys,), 1.02),
            "bonus": torch.full((heads, self.key_dim), -0.04),
            "receptance.weight": uniform((keys, width), 0.5 / root),
            "key.weight": uniform((keys, width), 0.05 / root),
            "value.weight": uniform((values, width), 0.5 / root),
            "out.weight": torch.zeros(width, values),
        }
        if self.value_mix is not None:
            weights["value_mix.up.bias"] = 0.73 - 0.4 * (ramp(values) - 0.5)
        return weights

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], CurrentToken]:
        previous, last = token_shift(x, carry.get("shift"), span)
        xr, xw, xk, xv, xa, xg = self.mix(x, previous)
        k, a = self.key(xk), self.rate(xa).sigmoid()
        log_decay = -math.exp(-0.5) * at_least_float32(self.decay_in(xw)).sigmoid()
        erase, written = k * self.erase_scale.to(k.dtype), k * (1 + (a - 1) * self.rate_scale.to(k.dtype))
        r, k, v, a, erase, log_decay = self.heads_of(
            self.receptance(xr), written, self._value(xv, span.shared), a, erase, log_decay
        )
        erase = l2_normalize(erase)
        update = Update(
            r,
            k.unsqueeze(3),
            v.unsqueeze(3),
            log_decay,
            erase_key=erase,
            erase_write=a * erase,
            erase_on="undecayed",
            reset=span.reset,
            mask=span.mask,
        )
        return update, {"shift": last}, CurrentToken(r, k, v, self.gate(xg))

    def _value(self, x: Tensor, shared: dict[str, Tensor] | None) -> Tensor:
        """The value `[B, T, H·V]`. The first layer stores its value in `shared` for the layers above."""
        v = self.value(x)
        shared = {} if shared is None else shared
        if self.value_mix is None:
            shared["value"] = v
            return v
        first = shared.setdefault("value", v)
        if first.shape != v.shape:
            raise ValueError(f"shared['value'] has shape {list(first.shape)}, expected [B, T, H·V] = {list(v.shape)}")
        return torch.lerp(v, first, self.value_mix(x).sigmoid())

    def output(self, o: Tensor, x: Tensor, extra: CurrentToken) -> Tensor:
        bonus = extra.bonus(self.bonus).flatten(-2)
        return self.out((self.norm(o) + bonus) * extra.gate)


def _rank(width: int, factor: float) -> int:
    """factor · √width to the nearest 32, at least 32."""
    return max(32, 32 * round(factor * math.sqrt(width) / 32))
