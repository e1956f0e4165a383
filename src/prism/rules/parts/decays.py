"""Forget gates, in log space. Computed in float32 or better: bfloat16 would round a decay near 1 to 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.token import DecayWeights
from prism.rules.parts import LowRank, at_least_float32, split_heads
from prism.rules.rule import set_initial_weights

DRAWN = "drawn"
"""Timescales, or weights (`start`), at random, as Mamba-2 and Gated DeltaNet are published."""


def log_sigmoid_decay(z: Tensor, power: float = 16.0) -> Tensor:
    """Log of σ(z)^{1/power}: the root keeps an untrained gate near 1 (GLA, Gated Retention)."""
    return F.logsigmoid(at_least_float32(z)) / power


def log_lower_bound(logits: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
    """log γ and log(1 - γ), each `[…]`, from logits `[layers, …]`: γ is the sum of a softmax over layers, over layers 1 … ℓ.

    Layer 0 has γ = 0, an empty sum.
    """
    log_share = at_least_float32(logits).log_softmax(0)
    first, below, above = log_share.split([1, layer_index, len(log_share) - 1 - layer_index])
    return below.logsumexp(0), torch.cat([first, above]).logsumexp(0)


def bounded_decay(z: Tensor, bound: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """log f and 1 - f for f = γ + (1 - γ)σ(z), from log γ and log(1 - γ) (HGRN, HGRN2)."""
    z = at_least_float32(z)
    log_decay = torch.logaddexp(bound[0], bound[1] + F.logsigmoid(z)).clamp(max=0.0)  # rounding may make it positive
    return log_decay, bound[1].exp() * torch.sigmoid(-z)  # 1 - f without the cancellation


def timescale_bias(size: int, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> Tensor:
    """softplus⁻¹ of step sizes drawn log-uniformly from [low, high] (Mamba's Δ bias)."""
    step = torch.exp(torch.rand(size) * (math.log(high) - math.log(low)) + math.log(low)).clamp(min=floor)
    return inverse_softplus(step)


def inverse_softplus(x: Tensor) -> Tensor:
    """softplus⁻¹ of positive numbers."""
    return x + torch.log(-torch.expm1(-x))


def spread(first: float, last: float, count: int) -> Tensor:
    """`[count]` numbers from `first` to `last`, evenly in log; a single one is their geometric mean."""
    if count == 1:
        return torch.full((1,), math.sqrt(first * last))
    return torch.logspace(math.log10(first), math.log10(last), count)


def check_timescales(timescales: str | Sequence[float]) -> None:
    """Raise a ValueError unless these are two positive numbers, or "drawn"."""
    if timescales == DRAWN:
        return
    numbers = timescales if isinstance(timescales, (list, tuple)) else ()
    if len(numbers) != 2 or not all(isinstance(n, (int, float)) and 0 < n < math.inf for n in numbers):
        raise ValueError(f"timescales must be {DRAWN!r} or two numbers of tokens above 0, got {timescales!r}")


class SoftplusDecay(nn.Module):
    """Log-decay -e^{A_log} · softplus(z + dt_bias), the gate of Mamba-2, Gated DeltaNet and KDA.

    `A_log` `[H]`, `dt_bias` `[H · channels]`, the size of z's last dimension. Both stay in float32.

    Args:
        a_range: where e^{A_log} is drawn from.
        timescales: tokens in which untrained heads (z = 0) forget by a factor e. Two numbers: heads are spread between them,
            evenly in log; a single head gets their geometric mean. `"drawn"`: at random as published, mostly from 1 to 100.
    """

    def __init__(
        self,
        heads: int,
        channels: int = 1,
        a_range: tuple[float, float] = (0.0, 16.0),
        timescales: str | Sequence[float] = DRAWN,
    ) -> None:
        super().__init__()
        check_timescales(timescales)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels))
        self.channels, self.a_range, self.timescales = channels, a_range, timescales
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        if not isinstance(self.timescales, str):
            first, last = self.timescales
            step = 1 / spread(first, last, len(self.A_log)).repeat_interleave(self.channels)
            return {"A_log": torch.zeros(len(self.A_log)), "dt_bias": inverse_softplus(step)}
        a = torch.empty(len(self.A_log)).uniform_(*self.a_range)
        a = a.clamp(min=1e-4)  # U(0, 16) can draw a number whose log is -inf
        return {"A_log": a.log(), "dt_bias": timescale_bias(len(self.dt_bias))}

    def step_size(self, z: Tensor) -> Tensor:
        """Δ = softplus(z + dt_bias)."""
        return F.softplus(z.to(self.dt_bias.dtype) + self.dt_bias)

    def forward(self, z: Tensor) -> Tensor:
        """z `[B, T, H]` → `[B, T, H]`, or `[B, T, H·K]` → `[B, T, H, K]` if a head has several channels."""
        step = self.step_size(z)
        rate = self.A_log.exp()
        if self.channels == 1:
            return -rate * step
        return -rate.unsqueeze(-1) * split_heads(step, len(rate))

    def decoding_weights(self) -> DecayWeights | None:
        """The gate's parameters; None for a subclass that computes something else."""
        same = type(self).forward is SoftplusDecay.forward and type(self).step_size is SoftplusDecay.step_size
        return DecayWeights(self.A_log, self.dt_bias) if same else None


def channel_decay(
    width: int, heads: int, key_dim: int, rank: int, timescales: str | Sequence[float] = DRAWN
) -> tuple[LowRank, SoftplusDecay]:
    """The map and the gate of a decay for every key channel, as in KDA."""
    mapped = LowRank(width, heads * key_dim, rank)
    return mapped, SoftplusDecay(heads, key_dim, a_range=(1.0, 16.0), timescales=timescales)


def head_numbers(x: Tensor, heads: int) -> Tensor:
    """`[H]`, 0 … H - 1 on x's device, in float64: decay rates are computed exactly, then rounded once."""
    return torch.arange(heads, dtype=torch.float64, device=x.device)


def constant_decay(rate: Tensor, x: Tensor) -> Tensor:
    """Expand a log-decay `[H]` to `[B, T, H]`; float32 unless x is float64."""
    return rate.to(torch.promote_types(x.dtype, torch.float32)).expand(*x.shape[:2], -1)
