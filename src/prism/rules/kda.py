"""Delta rules with a separate decay for every key channel: Kimi Delta Attention and Gated DeltaNet-2.

    KDA                S_t = (I - β k kᵀ) Diag(α_t) S_{t-1} + β k vᵀ                           (Kimi team, 2025)
    Gated DeltaNet-2   S_t = (I - k (e ⊙ k)ᵀ) Diag(α_t) S_{t-1} + k (w ⊙ v)ᵀ             (Hatamizadeh et al., 2026)

The decay comes first, so the erase sees the *decayed* state; the other order is a different model. Decay and output gate are
low-rank maps of rank V; the output is normalised per head and multiplied by the sigmoid (not SiLU) of its gate. In place of
one step size β, Gated DeltaNet-2 has a gate for each key channel that is erased and one for each value channel that is
written; e = w = β is KDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.layer_ops import delta_columns
from prism.engine.token import DecayWeights
from prism.rules.delta import DeltaFamily
from prism.rules.parts import Carry, LowRank, fused_linears, split_heads
from prism.rules.parts.decays import DRAWN, SoftplusDecay, channel_decay
from prism.rules.rule import DECAYED_REGRESSION, GENERALISED_REGRESSION, Paper, Span, per_head


class BoundedDecay(SoftplusDecay):
    """Log-decay bound · σ(e^{A_log}(z + dt_bias)): never stronger than `bound` per token. A_log starts at 0."""

    def __init__(self, heads: int, channels: int, bound: float) -> None:
        super().__init__(heads, channels, a_range=(1.0, 1.0))
        self.bound = bound

    def forward(self, z: Tensor) -> Tensor:
        z = split_heads(z.to(self.dt_bias.dtype) + self.dt_bias, len(self.A_log))
        return self.bound * torch.sigmoid(self.A_log.exp().unsqueeze(-1) * z)

    def decoding_weights(self) -> DecayWeights | None:
        same = type(self).forward is BoundedDecay.forward
        return DecayWeights(self.A_log, self.dt_bias, self.bound) if same else None


class Kda(DeltaFamily):
    """Kimi Delta Attention: Gated DeltaNet with a decay per key channel.

    Defaults as published: K = V (128 at any width, with width / 128 heads).

    Args:
        lower_bound: None for the softplus gate; a negative number (-5 in the published variant) for the bounded one.
        timescales: tokens in which untrained heads forget by a factor e, equal for the channels of a head: two numbers,
            between which heads are spread evenly in log, or `"drawn"`: at random for every channel, as published.
    """

    name = "kda"
    paper = Paper("Kimi Linear", "Kimi Team 2025", "https://arxiv.org/abs/2510.26692")
    objective = DECAYED_REGRESSION
    forgetting = "per channel, and along the key"
    transition = "diagonal · Householder"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        lower_bound: float | None = None,
        timescales: str | Sequence[float] = DRAWN,
        start: str = DRAWN,
    ) -> None:
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound is a log-decay: it must be negative or None, got {lower_bound!r}")
        if lower_bound is not None and timescales != DRAWN:
            raise ValueError("timescales are those of the softplus gate: omit them, or lower_bound")
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            gate=False,
            gate_by="sigmoid",
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            start=start,
        )
        K, V = self.key_dim, self.value_dim
        self.gate = LowRank(width, heads * V, rank=V, bias=True)
        if lower_bound is None:
            self.decay_in, self.decay = channel_decay(width, heads, K, V, timescales)
        else:
            self.decay_in, self.decay = LowRank(width, heads * K, V), BoundedDecay(heads, K, lower_bound)


class Gdn2(Kda):
    """Gated DeltaNet-2: KDA with a gate per key channel for the erase and one per value channel for the write.

    Defaults as published: K = V (128 at any width, with width / 128 heads).

    Args:
        negative_eigenvalues: whether the erase gate is 2σ(·) instead of σ(·).
        timescales: as in KDA.
    """

    name = "gdn2"
    paper = Paper("Gated DeltaNet-2", "Hatamizadeh et al. 2026", "https://arxiv.org/abs/2605.22791")
    objective = GENERALISED_REGRESSION
    forgetting = "per channel, and along a key"
    transition = "diagonal · (I + rank 1)"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        timescales: str | Sequence[float] = DRAWN,
        start: str = DRAWN,
    ) -> None:
        super().__init__(
            width,
            heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            timescales=timescales,
            start=start,
        )
        del self.beta  # replaced by the two gates
        self.erase = nn.Linear(width, heads * self.key_dim, bias=False)
        self.write = nn.Linear(width, heads * self.value_dim, bias=False)

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        assert self.decay_in is not None and self.decay is not None
        mixed, conv_state = self.conv(self.qkv(x), carry.get("conv"), span)
        erase, write, decay = fused_linears(x, self.erase, self.write, self.decay_in)
        erase, write = (split_heads(gate.sigmoid(), self.heads) for gate in (erase, write))
        q, k, v = delta_columns(mixed, mixed.new_ones(*mixed.shape[:2], self.heads), self.key_dim)
        update = Update(
            q,
            k,
            write.unsqueeze(3) * v,
            self.decay(decay),
            erase_key=self.beta_scale * erase * k.squeeze(3),
            erase_write_first=True,
            reset=span.reset,
            mask=span.mask,
        )
        return update, {"conv": conv_state}, None
