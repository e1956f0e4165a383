"""The weights of a layer by role, for engine/layer_step.py: what a rule says about itself in place of computing.

Weights are `[outputs, inputs]`, as in `nn.Linear`. A plan is made anew for every step, so it never outlives a change.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor
    eps: float


class LowRankPlan(NamedTuple):
    """The two halves of a low-rank map."""

    down: Tensor  # [R, D]
    up: Tensor  # [N, R]
    bias: Tensor | None = None  # [N]


class DecayPlan(NamedTuple):
    """A forget gate of z: the log-decay -e^A softplus(z + bias), or bound · σ(e^A (z + bias))."""

    log_rate: Tensor  # A, [H]
    bias: Tensor  # [H], or [H·K] for a decay per channel
    bound: float | None = None


class WritesPlan(NamedTuple):
    """PRISM's later writes."""

    taps: Tensor | None  # [W, D], the anchor's convolution; None: W = 1
    key: LowRankPlan | None
    gain: LowRankPlan | None
    expected: LowRankPlan | None
    beta: Tensor  # [H·N, D]
    scale: Tensor  # [N, H, V]
    solver: str
    nonlinearity: bool

    @property
    def maps(self) -> list[LowRankPlan]:
        return [m for m in (self.key, self.gain, self.expected) if m is not None]


class DeltaPlan(NamedTuple):
    """A layer of the delta family: its linear maps `[N, D]` and small parameters.

    A decay per channel is a low-rank map; a gate may be one.
    """

    heads: int
    key_dim: int
    value_dim: int
    substeps: int
    qkv: Tensor
    taps: Tensor | None  # [W, …], the convolution of q, k and v; None: W = 1
    beta: Tensor
    beta_scale: float
    decay_in: Tensor | LowRankPlan | None
    decay: DecayPlan | None
    gate: Tensor | LowRankPlan | None
    norm: Norm
    out: Tensor
    gate_by: str = "silu"
    writes: WritesPlan | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """The weights that multiply a token: those of maps, and first halves."""
        given = (self.qkv, self.beta, self.decay_in, self.gate)
        return [m.down if isinstance(m, LowRankPlan) else m for m in given if m is not None]

    @property
    def weights(self) -> list[Tensor]:
        """All weights that must have the token's dtype."""
        wide = [m.up for m in (self.decay_in, self.gate) if isinstance(m, LowRankPlan)]
        later = [] if self.writes is None else [*(w for m in self.writes.maps for w in m[:2]), self.writes.beta]
        return [*self.inputs, self.out, *wide, *later]

    @property
    def is_served(self) -> bool:
        """Whether the kernel has a case for this combination of maps."""
        decay = None if self.decay is None else self.decay.bias.shape[0] // self.heads
        per_channel = isinstance(self.decay_in, LowRankPlan)
        if (decay or 1) != (self.key_dim if per_channel else 1) or (self.decay_in is None) != (decay is None):
            return False
        later = [] if self.writes is None else self.writes.maps
        ranks = {m.down.shape[0] for m in later}
        return len(ranks) <= 1 and not any(m.bias is not None for m in later)


class GluPlan(NamedTuple):
    """A SwiGLU with its norm: weights `[N, D]`, `[N, D]` and `[D, N]`."""

    norm: Norm
    gate: Tensor
    up: Tensor
    down: Tensor
