"""RWKV-7: a decay per key channel, and an erase along a key of its own from the *undecayed* state.

    S_t = (Diag(w_t) - (a ⊙ κ̂) κ̂ᵀ) S_{t-1} + k̃ ṽᵀ          o_t = S_tᵀ r_t                    (Peng et al., 2025)

κ̂ = nrm(k ⊙ k_k) is looked up, a ⊙ κ̂ taken away: a step size per channel. k̃ = k ⊙ (1 + (a - 1) ⊙ k_a) is written. With
w = exp(-e^{-½} σ(·)) in (.545, 1) the eigenvalue along κ̂ is about w - a: mildly negative ones come for free. The bonus
(r·(r_k ⊙ k̃)) v for the token itself is added after the norm.

Layers above the first mix their value with the first layer's, which travels in `shared`. Without it (a mixer on its own) a
layer uses its own value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prism.engine import Update
from prism.rules.initial import set_initial_weights, uniform
from prism.rules.objectives import GENERALISED_REGRESSION
from prism.rules.parts import Carry, at_least_float32, l2_normalize, shift
from prism.rules.rule import Paper
from prism.rules.rwkv import ConstantStart, Own, RwkvFamily
from prism.rules.span import Span
from prism.rules.token_shift import TokenMix, mixtures, ramp


class Rwkv7(RwkvFamily):
    """RWKV-7 (Goose). The ranks of its low-rank maps follow from the width."""

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

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], Own]:
        previous, last = shift(x, carry.get("shift"), span)
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
        return update, {"shift": last}, Own(r, k, v, self.gate(xg))

    def _value(self, x: Tensor, shared: dict[str, Tensor] | None) -> Tensor:
        """`[B, T, H·V]`; the first layer leaves its value for the others."""
        v = self.value(x)
        shared = {} if shared is None else shared
        if self.value_mix is None:
            shared["value"] = v
            return v
        first = shared.setdefault("value", v)
        if first.shape != v.shape:
            raise ValueError(f"shared['value'] has shape {list(first.shape)}, expected [B, T, H·V] = {list(v.shape)}")
        return torch.lerp(v, first, self.value_mix(x).sigmoid())

    def output(self, o: Tensor, x: Tensor, extra: Own) -> Tensor:
        bonus = extra.bonus(self.bonus).flatten(-2)
        return self.out((self.norm(o) + bonus) * extra.gate)


def _rank(width: int, factor: float) -> int:
    """factor · √width to the nearest 32, at least 32."""
    return max(32, 32 * round(factor * math.sqrt(width) / 32))
