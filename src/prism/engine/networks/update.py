"""What a memory that is a network is told at every token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prism.engine.networks.network import Network
from prism.engine.update import InvalidValueError, values_may_be_read


@dataclass(frozen=True, eq=False)
class Averaged:
    """W_i = W_start - τ_i Σ_{j≤i} r_j g_j within a mini-batch (TTT): τ = 1/i makes it a mean, and belongs to the reader.

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
        window: c, how many tokens, the last one included, a step looks at.
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
        q: `[B, T, H, K]`, what is asked.
        k: `[B, T, H, K]` and
        v: `[B, T, H, V]`, the example: k should be answered with v.
        rate: r `[B, T, H]`, how much the example weighs.
        network: f, its loss, and the weights every document starts with.
        learner: `Averaged` or `Momentum`.
        mini_batch: b, how many tokens take their gradients at the same weights.
        reset: `[B, T]` bool, a document starts here: weights, momentum, window and mini-batch start anew.
        mask: `[B, T]` bool, False is padding; real tokens come first.
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
        """Whether U outlives a token: momentum, or the sum over an open mini-batch."""
        return self.mini_batch > 1 if isinstance(self.learner, Averaged) else self.learner.log_momentum is not None

    @property
    def keeps_current(self) -> bool:
        """Whether the weights that were last read are needed beside those at which gradients are taken."""
        return isinstance(self.learner, Momentum) and self.mini_batch > 1

    def plain(self) -> InnerUpdate:
        """In the state's dtype, with zeros on padding: rate 0 learns nothing, log-decay 0 forgets nothing."""

        def prepare(x: Tensor) -> Tensor:
            x = x.to(self.state_dtype)
            if self.mask is None:
                return x
            return torch.where(self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - 2)), x, 0.0)

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
        reset = self.reset if self.reset is None or self.mask is None else self.reset & self.mask
        q, k, v, rate = (prepare(x) for x in (self.q, self.k, self.v, self.rate))
        return replace(self, q=q, k=k, v=v, rate=rate, learner=learner, reset=reset)

    def finish(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        """Outputs as the caller gets them: zero on padding, in the dtype he came with."""
        o = o if self.mask is None else torch.where(self.mask[..., None, None], o, 0.0)
        return o.to(dtype)


def _check_examples(u: InnerUpdate) -> None:
    for name, letters in (("q", "[B, T, H, K]"), ("k", "[B, T, H, K]"), ("v", "[B, T, H, V]"), ("rate", "[B, T, H]")):
        x = getattr(u, name)
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.ndim != letters.count(",") + 1:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a floating-point tensor {letters}, got {got}")
    B, T, H, K = u.q.shape
    if T == 0:
        raise ValueError(f"q has no tokens: shape {list(u.q.shape)}, expected T ≥ 1 in [B, T, H, K]")
    _expect("k", u.k, (B, T, H, K), "[B, T, H, K]")
    _expect("v", u.v, (B, T, H, u.v.shape[-1]), "[B, T, H, V]")
    _expect("rate", u.rate, (B, T, H), "[B, T, H]")
    for name in ("reset", "mask"):
        x = getattr(u, name)
        if x is not None:
            _expect(name, x, (B, T), "[B, T]")
            if x.dtype != torch.bool:
                raise ValueError(f"{name} must be a bool tensor, got {x.dtype}")
    if not isinstance(u.mini_batch, int) or u.mini_batch < 1:
        raise ValueError(f"mini_batch must be a whole number ≥ 1, got {u.mini_batch!r}")


def _check_network(u: InnerUpdate) -> None:
    H, size, V = u.q.shape[2], u.q.shape[3], u.v.shape[3]
    biases = u.network.biases
    if not u.network.depth or (biases is not None and len(biases) != u.network.depth):
        raise ValueError("network needs at least one weight matrix, and as many biases or none")
    for layer, w in enumerate(u.network.weights):
        out = w.shape[-1] if layer + 1 < u.network.depth else V
        _expect(f"network.weights[{layer}]", w, (H, size, out), "[H, in, out]")
        if biases is not None:
            _expect(f"network.biases[{layer}]", biases[layer], (H, out), "[H, out]")
        size = out
    for x in u.network.norm or ():
        _expect("network.norm", x, (H, V), "[H, V]")
    if u.network.residual and u.q.shape[3] != V:
        raise ValueError(f"a residual network needs keys and values of one size, got K = {u.q.shape[3]} and V = {V}")


def _check_learner(u: InnerUpdate) -> None:
    learner = u.learner
    if isinstance(learner, Averaged):
        _expect("learner.scale", learner.scale, (u.mini_batch,), "[b]")
        return
    if not isinstance(learner, Momentum):
        raise ValueError(f"learner must be Averaged or Momentum, got {type(learner).__name__}")
    for name in ("log_decay", "log_momentum", "step"):
        gate = getattr(learner, name)
        if gate is not None:
            _expect(f"learner.{name}", gate, tuple(u.rate.shape), "[B, T, H]")
    if not isinstance(learner.window, int) or learner.window < 1:
        raise ValueError(f"learner.window must be a whole number ≥ 1, got {learner.window!r}")
    if not isinstance(learner.newton_schulz, int) or learner.newton_schulz < 0:
        raise ValueError(f"learner.newton_schulz must be a whole number ≥ 0, got {learner.newton_schulz!r}")
    if learner.newton_schulz and u.network.biases is not None:
        raise ValueError("learner.newton_schulz orthogonalises matrices: the network must have no biases")


def _expect(name: str, x: object, shape: tuple[int, ...], letters: str) -> None:
    if not isinstance(x, Tensor) or tuple(x.shape) != shape:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} has shape {got}, expected {letters} = {list(shape)}")


def _check_values(u: InnerUpdate) -> None:
    if u.mask is not None and bool((u.mask[:, 1:] & ~u.mask[:, :-1]).any()):
        raise ValueError(
            "mask has padding before real tokens: InnerUpdate takes real tokens first (Mixer takes any order)"
        )
    if isinstance(u.learner, Averaged):
        return
    for name in ("log_decay", "log_momentum"):
        gate = getattr(u.learner, name)
        if gate is None:
            continue
        good = (gate.detach() <= 0) & (gate.detach() > -torch.inf)
        if u.mask is not None:
            good = good | ~u.mask.unsqueeze(-1)
        if not bool(good.all()):
            raise InvalidValueError(f"learner.{name} must be finite and ≤ 0: pass the logarithm of a number in (0, 1]")
