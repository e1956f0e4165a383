"""Mamba-3 (SISO): a state space model with a trapezoidal step and a state that rotates.

    S_t = α_t R_t S_{t-1} + α_t (1 - λ_t) Δ_t R_t B_{t-1} x_{t-1}ᵀ + λ_t Δ_t B_t x_tᵀ          (Lahoti et al., 2026)
    y_t = S_tᵀ C_t + D x_t

    α_t = exp(-Δ_t softplus(a_t))     Δ_t = softplus(d_t + dt_bias)     λ_t = σ(l_t)     a, d, l: maps to a number per head

*Trapezoidal step.* Mamba-2 takes the input at the end of the step Δ_t for all of it (λ = 1). Here the ends of the step are
weighted: a token writes its own B x and once more, decayed, that of the token before it. So a token makes two writes.

*Rotation.* A complex state turns pairs of its channels: R_t = R(Δ_t π tanh(θ_t))ᵀ, where θ is a map of the token that all heads
share, and R(φ) turns by the angle φ. Rotations of a plane commute, with each other and with α, so that they move from the
state to B and C: with φ_t = Σ_{i ≤ t} Δ_i π tanh(θ_i), R(φ_t) turns B_t and C_t, and the state only decays. That is the normal
form, with a decay per head, two writes and no erase. It needs two things from the past, which are carried: the token before,
and φ. Where a document starts, both start anew. Channels i and i + pairs are a pair; its authors' code pairs neighbours,
which is the same up to the order of the channels of B and C.

B and C are normalised (RMSNorm), then get a bias per head and channel, which starts at 1. This and the second write stand
in for Mamba-2's short convolution, so there is none. There is no norm on the output: out((y + D x) ⊙ SiLU(z)).

*Why SISO only.* The MIMO variant writes R keys and values a token, which the engine can, and reads R queries whose answers
are gated separately before they are summed over R. The normal form has one read per head and token. R heads would be R
memories, R times the state; R rows a token would run the whole memory R times as long. Both give up what MIMO is made for.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.recompute import cheap
from prism.rules.hebbian import HebbianFamily
from prism.rules.parts import Carry, at_least_float32, fused_linears, rotate_pairs, split_heads, token_shift
from prism.rules.parts.angles import running_angle
from prism.rules.parts.decays import timescale_bias
from prism.rules.parts.norms import rms_norm
from prism.rules.rule import TWO_CORRELATIONS, Paper, Span, per_head, set_initial_weights

SLOWEST = 1e-4
"""The lowest rate of decay: softplus(a) is not allowed to be lower."""


class Mamba3(HebbianFamily):
    """Mamba-3 (SISO): a selective state space with a trapezoidal step, rotations, and no convolution.

    Defaults as published: K = 128 (`d_state`), H·V = 2 · width, one group, half of the channels rotated.

    Args:
        key_dim: N, the state size of a channel (`d_state`).
        value_dim: channels of a head; 2 · width / heads by default.
        groups: number of separate B and C; a divisor of `heads`.
        conv_size: size of a short convolution on B, C and x, in tokens; 1, as published, means no convolution.
        trapezoidal: whether a token also writes the token before it; False is λ = 1, one write per token.
        rotary_fraction: share of the channels of B and C that are rotated, from 0 (none, a real state) to 1.
        bc_norm: whether B and C are normalised.
        bc_bias: whether B and C get a bias.
    """

    name = "mamba3"
    paper = Paper("Mamba-3", "Lahoti et al. 2026", "https://arxiv.org/abs/2603.15569")
    objective = TWO_CORRELATIONS
    forgetting = "per head"
    transition = "scalar · rotation"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int = 128,
        value_dim: int | None = None,
        groups: int = 1,
        conv_size: int = 1,
        trapezoidal: bool = True,
        rotary_fraction: float = 0.5,
        bc_norm: bool = True,
        bc_bias: bool = True,
    ) -> None:
        super().__init__(
            width,
            heads,
            key_dim,
            per_head(width, heads, value_dim, ratio=2),
            conv_size=conv_size,
            activation=conv_size > 1,
            groups=groups,
        )
        self.write_rank = 2 if trapezoidal else 1
        pairs = _rotated_pairs(key_dim, rotary_fraction)
        self.step_in = nn.Linear(width, heads, bias=False)
        self.rate_in = nn.Linear(width, heads, bias=False)
        self.blend_in = nn.Linear(width, heads, bias=False) if trapezoidal else None
        self.angle_in = nn.Linear(width, pairs, bias=False) if pairs else None
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.key_norm = nn.RMSNorm(key_dim, eps=1e-5) if bc_norm else None
        self.query_norm = nn.RMSNorm(key_dim, eps=1e-5) if bc_norm else None
        self.key_bias = nn.Parameter(torch.empty(heads, key_dim)) if bc_bias else None
        self.query_bias = nn.Parameter(torch.empty(heads, key_dim)) if bc_bias else None
        self.skip = nn.Parameter(torch.empty(heads))
        set_initial_weights(self)
        self.gate = nn.Linear(width, heads * self.value_dim, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        weights = {"dt_bias": timescale_bias(self.heads), "skip": torch.ones(self.heads)}
        biases = ("key_bias", "query_bias") if self.key_bias is not None else ()
        return {**weights, **{name: torch.ones(self.heads, self.key_dim) for name in biases}}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], Tensor]:
        step, log_decay, blend, turn = self.controls(x)
        mixed, conv_state = self.conv(self.qkv(x), carry.get("conv"), span)

        def columns(
            mixed: Tensor, step: Tensor, log_decay: Tensor, blend: Tensor | None, turn: Tensor | None
        ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            return self._columns(mixed, step, log_decay, blend, turn, carry, span)

        (q, k, w), carried = cheap(columns, mixed, step, log_decay, blend, turn)
        update = Update(q, k, w, log_decay, reset=span.reset, mask=span.mask)
        value = split_heads(mixed[..., -self.sizes[-1] :], self.heads)
        return update, {"conv": conv_state, **carried}, value

    def controls(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Δ, log α and λ, each `[B, T, H]`, and π tanh(θ) `[B, T, pairs]`; None for what is switched off."""
        maps = [m for m in (self.step_in, self.rate_in, self.blend_in, self.angle_in) if m is not None]
        step, rate, *rest = [at_least_float32(z) for z in fused_linears(x, *maps)]
        step = F.softplus(step + self.dt_bias)
        log_decay = -F.softplus(rate).clamp(min=SLOWEST) * step
        blend = None if self.blend_in is None else rest[0].sigmoid()
        turn = None if self.angle_in is None else math.pi * rest[-1].tanh()
        return step, log_decay, blend, turn

    def _columns(
        self,
        mixed: Tensor,
        step: Tensor,
        log_decay: Tensor,
        blend: Tensor | None,
        turn: Tensor | None,
        carry: Carry,
        span: Span,
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """The query, the keys and the values of the writes, and what the next call needs."""
        q, k, v = mixed.split(self.sizes, -1)
        k = k if self.key_norm is None else rms_norm(self.key_norm, split_heads(k, self.groups)).flatten(2)
        q = q if self.query_norm is None else rms_norm(self.query_norm, split_heads(q, self.groups)).flatten(2)
        carried: dict[str, Tensor] = {}
        angles = None  # [B, 1 + T, H, pairs]: the angle before the first token comes first
        if turn is not None:
            angles, carried["angle"] = running_angle(step.unsqueeze(-1) * turn.unsqueeze(2), carry.get("angle"), span)
        here = None if angles is None else angles[:, 1:]
        q = self._rotated(q, self.query_bias, here)
        if blend is None:
            k = self._rotated(k, self.key_bias, here)
            return (q, k.unsqueeze(3), self._weighted(v, step).unsqueeze(3)), carried
        before, carried["token"] = token_shift(torch.cat([k, v], -1), carry.get("token"), span)
        earlier, old = before.split(self.sizes[1:], -1)
        keys = self._rotated(torch.cat([earlier[:, :1], k], 1), self.key_bias, angles)
        new = self._weighted(v, blend * step)
        again = self._weighted(old, (1 - blend) * step * log_decay.exp())
        return (q, torch.stack([keys[:, 1:], keys[:, :-1]], 3), torch.stack([new, again], 3)), carried

    def _rotated(self, z: Tensor, bias: Tensor | None, angles: Tensor | None) -> Tensor:
        """B or C `[B, T, G·K]` with its bias, rotated: `[B, T, H, K]`, or `[B, T, G, K]` if all heads of a group agree."""
        z = split_heads(z, self.groups)
        if bias is not None:
            shared = z.unsqueeze(3) + bias.to(z.dtype).unflatten(0, (self.groups, -1))
            z = shared.flatten(2, 3)
        elif angles is not None:
            z = z.repeat_interleave(self.heads // self.groups, 2)
        if angles is None:
            return z
        pairs = angles.shape[-1]
        turned, still = z.split([2 * pairs, self.key_dim - 2 * pairs], -1)
        return torch.cat([rotate_pairs(turned, angles.cos().to(z.dtype), angles.sin().to(z.dtype)), still], -1)

    def _weighted(self, v: Tensor, weight: Tensor) -> Tensor:
        """v `[B, T, H·V]` times a number per head `[B, T, H]`: `[B, T, H, V]`."""
        return split_heads(v, self.heads) * weight.unsqueeze(-1).to(v.dtype)

    def output(self, o: Tensor, x: Tensor, extra: Tensor) -> Tensor:
        """`extra` `[B, T, H, V]` is the value, before it is weighted."""
        assert self.gate is not None
        y = o + self.skip.unsqueeze(-1).to(o.dtype) * extra
        return self.out(y.flatten(-2) * F.silu(self.gate(x)))


def _rotated_pairs(key_dim: int, fraction: float) -> int:
    """How many pairs of channels rotate."""
    if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise ValueError(f"rotary_fraction must be a number from 0 to 1, got {fraction!r}")
    pairs = int(key_dim * fraction) // 2
    if fraction and not pairs:
        raise ValueError(
            f"rotary_fraction = {fraction} of key_dim = {key_dim} channels is not a pair: raise one of them, or set "
            "rotary_fraction to 0"
        )
    return pairs
