"""The inputs of a network memory at every token: examples, queries, and how the network learns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prism.engine.inputs import (
    check_flags,
    check_integer,
    check_log_decay,
    check_padding_last,
    check_shape,
    describe,
    real_resets,
    values_may_be_read,
    zero_padding,
)
from prism.engine.networks.network import Network


@dataclass(frozen=True, eq=False)
class Averaged:
    """W_i = W_start - τ_i Σ_{j≤i} r_j g_j within a mini-batch (TTT). τ_i belongs to the token i that reads: 1/i makes a mean.

    Args:
        scale: τ, `[b]`, one for every place in a mini-batch.
    """

    scale: Tensor


@dataclass(frozen=True, eq=False)
class Momentum:
    """U_i = μ_i U_{i-1} + Σ_{i-c < j ≤ i} r_j g_j, W_i = κ_i W_{i-1} - s_i P(U_i) (Titans, ATLAS).

    Args:
        log_decay: log κ `[B, T, H]`, finite and ≤ 0; None keeps the weights.
        log_momentum: log μ `[B, T, H]`, finite and ≤ 0; None: no momentum (μ = 0).
        step: s `[B, T, H]`; None is 1.
        window: c, how many examples a step uses, the current token included.
        newton_schulz: how many iterations orthogonalise U before it is applied; 0 applies U itself.
    """

    log_decay: Tensor | None = None
    log_momentum: Tensor | None = None
    step: Tensor | None = None
    window: int = 1
    newton_schulz: int = 0


@dataclass(frozen=True, eq=False)
class InnerUpdate:
    """T examples and queries, and how a network learns from them.

    Args:
        q: `[B, T, H, K]`, the queries.
        k: `[B, T, H, K]`, the examples' inputs.
        v: `[B, T, H, V]`, the examples' targets: f(k) should be v.
        rate: r `[B, T, H]`, how much the example weighs.
        network: f, its loss, and the weights every document starts with.
        learner: `Averaged` or `Momentum`.
        mini_batch: b, how many tokens take their gradients at the same weights.
        reset: `[B, T]` bool, a document starts here: weights, momentum, window and mini-batch restart.
        mask: `[B, T]` bool, False is padding, which must follow the real tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rate: Tensor
    network: Network
    learner: Averaged | Momentum
    mini_batch: int = 16
    reset: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        _check_examples(self)
        _check_network(self)
        _check_learner(self)
        if values_may_be_read(self.v):
            _check_values(self)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64 if self.v.dtype == torch.float64 else torch.float32

    @property
    def window(self) -> int:
        return self.learner.window if isinstance(self.learner, Momentum) else 1

    @property
    def keeps_gradient(self) -> bool:
        """Whether U is part of the state: momentum, or the sum over a partial mini-batch."""
        return self.mini_batch > 1 if isinstance(self.learner, Averaged) else self.learner.log_momentum is not None

    @property
    def keeps_current(self) -> bool:
        """Whether the state holds the last token's weights in addition to those at which gradients are taken."""
        return isinstance(self.learner, Momentum) and self.mini_batch > 1

    def prepared(self) -> InnerUpdate:
        """A copy in the state's dtype, with zeros on padding: rate 0 learns nothing, log-decay 0 forgets nothing."""

        def prepare(x: Tensor) -> Tensor:
            return zero_padding(x.to(self.state_dtype), self.mask)

        def gate(x: Tensor | None) -> Tensor | None:
            return None if x is None else prepare(x)

        learner = self.learner
        if isinstance(learner, Averaged):
            learner = Averaged(learner.scale.to(self.state_dtype))
        else:
            learner = replace(
                learner,
                log_decay=gate(learner.log_decay),
                log_momentum=gate(learner.log_momentum),
                step=gate(learner.step),
            )
        reset = real_resets(self.reset, self.mask)
        q, k, v, rate = (prepare(x) for x in (self.q, self.k, self.v, self.rate))
        return replace(self, q=q, k=k, v=v, rate=rate, learner=learner, reset=reset)

    def finish(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        """Outputs for the caller: zero on padding, in the caller's dtype."""
        return zero_padding(o, self.mask).to(dtype)


def _check_examples(u: InnerUpdate) -> None:
    for name, letters in (("q", "[B, T, H, K]"), ("k", "[B, T, H, K]"), ("v", "[B, T, H, V]"), ("rate", "[B, T, H]")):
        x = getattr(u, name)
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.ndim != letters.count(",") + 1:
            raise ValueError(f"{name} must be a floating-point tensor {letters}, got {describe(x)}")
    B, T, H, K = u.q.shape
    if T == 0:
        raise ValueError(f"q has no tokens: shape {list(u.q.shape)}, expected T ≥ 1 in [B, T, H, K]")
    check_shape("k", u.k, (B, T, H, K), "[B, T, H, K]")
    check_shape("v", u.v, (B, T, H, u.v.shape[-1]), "[B, T, H, V]")
    check_shape("rate", u.rate, (B, T, H), "[B, T, H]")
    check_flags(u.reset, u.mask, (B, T))
    check_integer("mini_batch", u.mini_batch)


def _check_network(u: InnerUpdate) -> None:
    H, size, V = u.q.shape[2], u.q.shape[3], u.v.shape[3]
    biases = u.network.biases
    if not u.network.depth or (biases is not None and len(biases) != u.network.depth):
        raise ValueError("network needs at least one weight matrix, and as many biases or none")
    for layer, w in enumerate(u.network.weights):
        out = w.shape[-1] if layer + 1 < u.network.depth else V
        check_shape(f"network.weights[{layer}]", w, (H, size, out), "[H, in, out]")
        if biases is not None:
            check_shape(f"network.biases[{layer}]", biases[layer], (H, out), "[H, out]")
        size = out
    for x in u.network.norm or ():
        check_shape("network.norm", x, (H, V), "[H, V]")
    if u.network.residual and u.q.shape[3] != V:
        raise ValueError(
            f"a residual network needs keys and values of the same size, got K = {u.q.shape[3]} and V = {V}"
        )


def _check_learner(u: InnerUpdate) -> None:
    learner = u.learner
    if isinstance(learner, Averaged):
        check_shape("learner.scale", learner.scale, (u.mini_batch,), "[b]")
        return
    if not isinstance(learner, Momentum):
        raise ValueError(f"learner must be Averaged or Momentum, got {type(learner).__name__}")
    for name in ("log_decay", "log_momentum", "step"):
        gate = getattr(learner, name)
        if gate is not None:
            check_shape(f"learner.{name}", gate, tuple(u.rate.shape), "[B, T, H]")
    check_integer("learner.window", learner.window)
    check_integer("learner.newton_schulz", learner.newton_schulz, least=0)
    if learner.newton_schulz and u.network.biases is not None:
        raise ValueError("learner.newton_schulz orthogonalises matrices: the network must have no biases")


def _check_values(u: InnerUpdate) -> None:
    check_padding_last(u.mask, "InnerUpdate")
    if isinstance(u.learner, Averaged):
        return
    for name in ("log_decay", "log_momentum"):
        gate = getattr(u.learner, name)
        if gate is not None:
            check_log_decay(gate, u.mask, f"learner.{name}")
