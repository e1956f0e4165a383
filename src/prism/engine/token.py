"""One token per row through a layer of the delta family, from the layer's weights by role.

`delta` computes x + mixer(norm x), or the mixer alone, and `glu` the SwiGLU after it; both equal the layer's forward pass up
to rounding. A rule says which weights play which role (`DeltaWeights`), and where they are they are read:

- In torch, the definition, for a CPU. `Merged` holds copies of the weights in which one product computes all maps of a
  token, stored so that a product with one row reads them as fast as memory allows. What keeps them must notice changes.
- On a GPU in seven kernels. Nothing is copied or kept between steps.

    1  norm, PRISM's anchor                                                                          token_maps.py
    2  all projections of the input, convolution window, first halves of PRISM's low-rank maps       token_maps.py
    3  second halves, norms, gates, solver, memory, gated norm of the output                         token_memory.py
    4  output projection, residual                                                                   token_maps.py
    5  norm                                                                                          token_maps.py
    6  gate and up projections, SiLU                                                                 token_maps.py
    7  down projection, residual                                                                     token_maps.py

A state is read, and a new one returned: an interrupted token changes nothing. On a GPU a state may be overwritten on request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import compat
from prism.engine.kernels import available
from prism.engine.layer_ops import UNIT_EPS
from prism.engine.memory import resolve

STATE_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes in which a memory is kept between tokens; float64 for float64 tokens."""
WIDE = 1.5
"""Outputs over inputs from which a weight is stored by columns: the product with one row then takes half the time."""
LARGEST = 2**26
"""Bytes of a merged weight. Reading a larger one takes so long that what merging saves does not matter."""


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor
    eps: float


class LowRankWeights(NamedTuple):
    """The two halves of a low-rank map. Weights are `[outputs, inputs]`, as in `nn.Linear`."""

    down: Tensor  # [R, D]
    up: Tensor  # [N, R]
    bias: Tensor | None = None  # [N]


class DecayWeights(NamedTuple):
    """A forget gate of z: the log-decay -e^A softplus(z + bias), or bound · σ(e^A (z + bias))."""

    log_rate: Tensor  # A, [H]
    bias: Tensor  # [H], or [H·K] for a decay per channel
    bound: float | None = None


class WritesWeights(NamedTuple):
    """PRISM's later writes."""

    taps: Tensor | None  # [W, D], the anchor's convolution; None: W = 1
    key: LowRankWeights | None
    gain: LowRankWeights | None
    expected: LowRankWeights | None
    beta: Tensor  # [H·N, D]
    scale: Tensor  # [N, H, V]
    solver: str
    nonlinearity: bool

    @property
    def maps(self) -> list[LowRankWeights]:
        return [m for m in (self.key, self.gain, self.expected) if m is not None]


class DeltaWeights(NamedTuple):
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
    decay_in: Tensor | LowRankWeights | None
    decay: DecayWeights | None
    gate: Tensor | LowRankWeights | None
    norm: Norm
    out: Tensor
    gate_by: str = "silu"
    writes: WritesWeights | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """The weights that multiply a token: those of maps, and first halves."""
        given = (self.qkv, self.beta, self.decay_in, self.gate)
        return [m.down if isinstance(m, LowRankWeights) else m for m in given if m is not None]

    @property
    def weights(self) -> list[Tensor]:
        """All weights that must have the token's dtype."""
        wide = [m.up for m in (self.decay_in, self.gate) if isinstance(m, LowRankWeights)]
        later = [] if self.writes is None else [*(w for m in self.writes.maps for w in m[:2]), self.writes.beta]
        return [*self.inputs, self.out, *wide, *later]

    @property
    def has_kernel(self) -> bool:
        """Whether the kernel has a case for this combination of maps."""
        decay = None if self.decay is None else self.decay.bias.shape[0] // self.heads
        per_channel = isinstance(self.decay_in, LowRankWeights)
        if (decay or 1) != (self.key_dim if per_channel else 1) or (self.decay_in is None) != (decay is None):
            return False
        later = [] if self.writes is None else self.writes.maps
        ranks = {m.down.shape[0] for m in later}
        return len(ranks) <= 1 and not any(m.bias is not None for m in later)


class GluWeights(NamedTuple):
    """A SwiGLU with its norm: weights `[N, D]`, `[N, D]` and `[D, N]`."""

    norm: Norm
    gate: Tensor
    up: Tensor
    down: Tensor


class DeltaState(NamedTuple):
    """What a layer of the delta family carries from token to token."""

    memory: Tensor  # [B, H, K, V]
    conv: Tensor | None  # [B, W - 1, …]; None: no convolution
    anchor: Tensor | None  # [B, W - 1, D]; None: no convolution, or no later writes

    @classmethod
    def of(cls, x: Tensor, layer: DeltaWeights, memory: object, carry: Mapping[str, Tensor]) -> DeltaState | None:
        """These tensors if they are a state of the layer for x `[B, D]`; otherwise None."""
        if layer.qkv.dtype != x.dtype:
            return None
        rows, anchor = x.shape[0], None if layer.writes is None else layer.writes.taps
        if not isinstance(memory, Tensor) or memory.shape != (rows, layer.heads, layer.key_dim, layer.value_dim):
            return None
        if memory.device != x.device:
            return None
        if memory.dtype != x.dtype if x.dtype == torch.float64 else memory.dtype not in STATE_DTYPES:
            return None
        if len(carry) != (layer.taps is not None) + (anchor is not None):
            return None
        for name, taps in (("conv", layer.taps), ("anchor", anchor)):
            if taps is not None:
                window = carry.get(name)
                if window is None or window.shape != (rows, taps.shape[0] - 1, taps.shape[1]):
                    return None
                if window.dtype != x.dtype or window.device != x.device:
                    return None
        return cls(memory, carry.get("conv"), carry.get("anchor"))

    @property
    def carry(self) -> dict[str, Tensor]:
        named = {"conv": self.conv, "anchor": self.anchor}
        return {name: window for name, window in named.items() if window is not None}

    def contiguous(self) -> DeltaState:
        """This state itself if all of it is contiguous; otherwise a copy."""
        return DeltaState(*(None if z is None else z.contiguous() for z in self))  # type: ignore[arg-type]

    def like(self) -> DeltaState:
        """New memory for a state of the same sizes."""
        return DeltaState(*(None if z is None else torch.empty_like(z) for z in self))  # type: ignore[arg-type]


def allowed(x: Tensor) -> bool:
    """Whether a token x `[B, D]` may be computed as one: an eager call without gradients, in no form that needs sequences."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    if resolve()[0] not in ("auto", "recurrent") or type(x) is not Tensor or os.environ.get("PRISM_CHECK") == "1":
        return False
    return not compat.transforms_active(x)


# In torch


class ScaledNorm(NamedTuple):
    """An RMSNorm over D channels as √D w ⊙ x / sqrt(|x|² + D eps): fewer operations than torch's own on a CPU."""

    weight: Tensor
    root: Tensor  # the root of D · eps

    @classmethod
    def of(cls, norm: Norm, dtype: torch.dtype, scale: float = 1.0) -> ScaledNorm:
        """The norm of `scale` x, given x."""
        width = norm.weight.shape[0]
        root = torch.tensor((width * norm.eps) ** 0.5 / scale, dtype=dtype)
        return cls(norm.weight.detach().to(dtype) * width**0.5, root)

    def __call__(self, x: Tensor) -> Tensor:
        return _unit(x, self.root).mul_(self.weight)


class Merged:
    """The weights of a layer in torch's way of computing a token: maps `[inputs, outputs]`, as few as possible."""

    def __init__(self, layer: DeltaWeights, norm: Norm | None = None) -> None:
        self.layer, dtype = layer, layer.qkv.dtype
        self.has_decay = layer.decay_in is not None
        self.inputs, self.sizes = joined(layer.inputs), [len(w) for w in layer.inputs]
        self.decay_up, self.gate_up = (
            joined([m.up]) if isinstance(m, LowRankWeights) else None for m in (layer.decay_in, layer.gate)
        )
        self.out, self.taps = layer.out.mT.detach(), _taps(layer.taps, dtype)
        keys, values = layer.heads * layer.key_dim, layer.heads * layer.value_dim
        self.columns = [(1 + layer.substeps) * keys, layer.substeps * values]
        self.root = torch.tensor(UNIT_EPS**0.5, dtype=dtype)
        # The query's scale K^-½ is part of the norm.
        self.norm = None if norm is None else ScaledNorm.of(norm, dtype)
        self.out_norm = ScaledNorm.of(layer.norm, dtype, layer.key_dim**-0.5)
        decay = layer.decay
        if decay is not None:
            rate = decay.log_rate.detach().exp().unsqueeze(-1)  # [H, 1]
            self.rate, self.bias = -rate if decay.bound is None else rate, decay.bias.detach()
        writes = layer.writes
        if writes is not None:
            of_u = [*(m.down for m in writes.maps), writes.beta]
            self.of_u, ranks = joined(of_u), sum(len(m.down) for m in writes.maps)
            self.sizes_of_u = [ranks, len(writes.beta)] if ranks else [len(writes.beta)]
            # All second halves as one block-diagonal map.
            self.ups = torch.block_diag(*(m.up.detach().mT for m in writes.maps)) if ranks else None
            self.wide_sizes = [len(m.up) for m in writes.maps]
            self.scale = writes.scale.detach().movedim(0, 1).to(dtype)  # [H, N, V]
            self.anchor_taps = _taps(writes.taps, dtype)

    @classmethod
    def of(cls, layer: DeltaWeights | None, norm: Norm | None = None) -> Merged | None:
        """The merged weights of a layer, with the norm before it; None if they differ in dtype, are in low precision, not on a
        CPU, or too large."""
        if layer is None or not _can_merge(layer.weights, layer.inputs):
            return None
        biased = layer.writes is not None and any(m.bias is not None for m in layer.writes.maps)
        return None if biased else cls(layer, norm)


def _taps(taps: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if taps is None else taps.detach().to(dtype)


class MergedGlu:
    """The weights of a SwiGLU, gate and up in one."""

    def __init__(self, glu: GluWeights) -> None:
        self.norm = ScaledNorm.of(glu.norm, glu.gate.dtype)
        self.both, self.down = joined([glu.gate, glu.up]), glu.down.mT.detach()

    @classmethod
    def of(cls, glu: GluWeights | None) -> MergedGlu | None:
        """As `Merged.of`."""
        return None if glu is None or not _can_merge(glu[1:], glu[1:3]) else cls(glu)


def _can_merge(weights: Sequence[Tensor], merged: Sequence[Tensor]) -> bool:
    first = weights[0]
    if first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        return False
    plain = not any(w.is_inference() for w in weights)  # a change in place would not be noticed
    return plain and uniform(first, *weights) and sum(w.nbytes for w in merged) <= LARGEST


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights `[N_i, D]` as one, `[D, ΣN]`, without a copy where that would not be faster."""
    weight = weights[0].detach() if len(weights) == 1 else torch.cat([w.detach() for w in weights])
    return weight.mT.contiguous() if is_wide(weight) and weight.nbytes <= LARGEST else weight.mT


def is_wide(weight: Tensor) -> bool:
    """Whether a weight `[outputs, inputs]` is better stored by columns."""
    return weight.shape[0] >= WIDE * weight.shape[1]


def uniform(x: Tensor, *weights: Tensor) -> bool:
    """Whether all weights are of x's dtype and device."""
    return all(w.dtype == x.dtype and w.device == x.device for w in weights)


def delta(x: Tensor, merged: Merged, state: DeltaState) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """mixer(x) for x `[B, D]`, or x + mixer(norm x) if the norm is among the weights; memory and carry after this token."""
    layer, norm = merged.layer, merged.norm
    B, H, K, V, steps = x.shape[0], layer.heads, layer.key_dim, layer.value_dim, layer.substeps
    n = x if norm is None else norm(x)
    projected, beta, *others = torch.split_with_sizes(torch.mm(n, merged.inputs), merged.sizes, -1)
    decay = others.pop(0) if merged.has_decay else None
    gate = others[0] if others else None
    carry: dict[str, Tensor] = {}
    mixed = _convolved(projected, state.conv, merged.taps, carry, "conv")
    keys, values = torch.split_with_sizes(mixed, merged.columns, -1)
    q, *k = _unit(keys.view(B, 1 + steps, H, K), merged.root).unbind(1)
    strength = beta.sigmoid_()
    if layer.beta_scale != 1.0:
        strength = strength.mul_(layer.beta_scale)
    v = [values.view(B, H, V)] if steps == 1 else values.view(B, steps, H, V).unbind(1)
    rates = [strength] if steps == 1 else strength.view(B, steps, H).unbind(1)
    # The memories of all heads are one batch of matrices. S is new after its first change, and then changed in place.
    before = state.memory if state.memory.dtype == x.dtype else state.memory.to(x.dtype)
    before, S = before.reshape(B * H, K, V), None
    if decay is not None:
        S = before * _decay(decay, merged, B).reshape(B * H, -1, 1)
    for key, value, rate in zip(k, v, rates, strict=True):
        key = key.reshape(B * H, 1, K)
        error = torch.baddbmm(value.reshape(B * H, 1, V), key, before if S is None else S, alpha=-1)
        error.mul_(rate.reshape(B * H, 1, 1))
        S = torch.baddbmm(before, key.mT, error) if S is None else S.baddbmm_(key.mT, error)
    assert S is not None
    if layer.writes is not None:
        later, written = _later_writes(n, merged, layer.writes, state.anchor, v[0], k[0], carry)
        S.baddbmm_(later.mT, written)
    y = merged.out_norm(torch.bmm(q.reshape(B * H, 1, K), S).view(B, H, V)).view(B, H * V)
    if gate is not None:
        gate = _widened(gate, merged.gate_up, layer.gate)
        y.mul_(gate.sigmoid_() if layer.gate_by == "sigmoid" else F.silu(gate, inplace=True))
    y = torch.mm(y, merged.out) if norm is None else torch.addmm(x, y, merged.out)
    memory = S.view(B, H, K, V)
    if memory.dtype != state.memory.dtype:
        memory = memory.to(state.memory.dtype)
    return y, memory, carry


def _later_writes(
    n: Tensor,
    merged: Merged,
    writes: WritesWeights,
    window: Tensor | None,
    v: Tensor,
    first: Tensor,
    carry: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Keys `[B·H, N, K]` and values `[B·H, N, V]` of PRISM's later writes.

    Args:
        v: the values `[B, H, V]`.
        first: the keys of the first write, `[B, H, K]`.
        carry: gets the anchor's window.
    """
    (B, H, V), N = v.shape, writes.scale.shape[0]
    u = _convolved(n, window, merged.anchor_taps, carry, "anchor")
    *low, beta = torch.split_with_sizes(torch.mm(u, merged.of_u), merged.sizes_of_u, -1)
    wide: Sequence[Tensor] = ()
    if merged.ups is not None:
        wide = torch.split_with_sizes(torch.mm(low[0], merged.ups), merged.wide_sizes, -1)
    parts = iter(wide)
    given = None if writes.key is None else next(parts).view(B, H, N, -1)
    keys = first.unsqueeze(2).expand(B, H, N, -1) if given is None else _unit(given, merged.root)
    given = None if writes.gain is None else next(parts).view(B, H, N, V)
    residual = v if writes.expected is None else v - next(parts).view(B, H, V)
    gains: Sequence[Tensor | float]
    if given is None:
        gains = [0.5 if writes.solver == "closed" else 1.0] * N
    else:
        given = given.sigmoid() if writes.solver == "closed" and writes.nonlinearity else given
        gains = [given.view(B, H, V)] if N == 1 else given.unbind(2)
    corrections = []
    for index, gain in enumerate(gains):
        correction = gain * residual
        if writes.solver == "gelu" and writes.nonlinearity:
            correction = F.gelu(correction)
        corrections.append(correction)
        if index + 1 < N:
            residual = residual - correction
    found = corrections[0].view(B, H, 1, V) if N == 1 else torch.stack(corrections, 2)
    values = found * (beta.sigmoid_().view(B, H, N, 1) * merged.scale)
    return keys.reshape(B * H, N, -1), values.view(B * H, N, V)


def _decay(z: Tensor, merged: Merged, rows: int) -> Tensor:
    """e^g `[B, H, 1]` or `[B, H, K]` for the map z of a token; computed in the gates' precision."""
    layer, dtype = merged.layer, z.dtype
    assert layer.decay is not None
    z = _widened(z, merged.decay_up, layer.decay_in).add(merged.bias).view(rows, layer.heads, -1)
    bound = layer.decay.bound
    g = F.softplus(z).mul_(merged.rate) if bound is None else torch.sigmoid(merged.rate * z).mul_(bound)
    return g.exp_() if g.dtype == dtype else g.exp_().to(dtype)


def _widened(z: Tensor, up: Tensor | None, m: Tensor | LowRankWeights | None) -> Tensor:
    """The second half of a low-rank map; z itself for a plain one."""
    if up is None or not isinstance(m, LowRankWeights):
        return z
    return torch.mm(z, up) if m.bias is None else torch.addmm(m.bias, z, up)


def _convolved(now: Tensor, window: Tensor | None, taps: Tensor | None, carry: dict[str, Tensor], name: str) -> Tensor:
    """SiLU of the convolution's output for this token `[B, D]`. `carry` gets its window after it, by this name."""
    if taps is None or window is None:
        return F.silu(now)
    seen = torch.cat([window, now.unsqueeze(1)], 1)
    carry[name] = seen.narrow(1, 1, seen.shape[1] - 1)
    return F.silu(torch.linalg.vecdot(seen, taps, dim=1), inplace=True)


def _unit(x: Tensor, root: Tensor) -> Tensor:
    """x / sqrt(|x|² + eps), given the root of eps."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(root)


def glu(x: Tensor, merged: MergedGlu) -> Tensor:
    """x + down(SiLU(gate n) ⊙ up n) for n = norm x, x `[B, D]`."""
    gate, up = torch.mm(merged.norm(x), merged.both).chunk(2, 1)
    return torch.addmm(x, F.silu(gate, inplace=True).mul_(up), merged.down)


# On a GPU


def kernels_serve(x: Tensor) -> bool:
    """Whether the kernels may compute one token per row, x `[B, D]`, if it is `allowed`: on a GPU.

    `using(backend="triton")` also allows Triton's interpreter on a CPU.
    """
    _, backend = resolve()
    if backend not in ("auto", "triton"):
        return False
    if not x.is_cuda and (backend == "auto" or x.dtype == torch.bfloat16):  # which the interpreter multiplies wrongly
        return False
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or type(x) is not Tensor:
        return False
    return not compat.in_dispatch_mode() and available.device_refuses(x) is None


def delta_by_kernels(
    x: Tensor, norm: Norm, layer: DeltaWeights, state: DeltaState, overwrite: bool
) -> tuple[Tensor, DeltaState]:
    """x + mixer(norm x) for x `[B, D]`, and the state after this token, which is `state` itself if it may be overwritten.

    All tensors are contiguous.
    """
    from prism.engine.kernels.token_maps import Window, maps, normed
    from prism.engine.kernels.token_memory import Places, delta_token

    new, writes = state if overwrite else state.like(), layer.writes
    anchor = None if writes is None else Window(writes.taps, state.anchor, new.anchor)
    n, u = normed(x, norm, anchor)
    inputs = layer.inputs
    of_u = [] if writes is None else [*(m.down for m in writes.maps), writes.beta]
    given = maps(n, inputs, u, of_u, window=Window(layer.taps, state.conv, new.conv))
    at_decay = inputs[0].shape[0] + inputs[1].shape[0]
    at_low = sum(weight.shape[0] for weight in inputs)
    at_gate = at_low if layer.gate is None else at_low - inputs[-1].shape[0]
    places = Places(inputs[0].shape[0], at_decay, at_gate, at_low)
    mixed = delta_token(given, places, layer, UNIT_EPS, state.memory, new.memory)
    return maps(mixed, [layer.out], residual=x), new


def glu_by_kernels(x: Tensor, weights: GluWeights) -> Tensor:
    """x + down(SiLU(gate n) ⊙ up n) for n = norm x, x `[B, D]`."""
    from prism.engine.kernels.token_maps import gated, maps, normed

    return maps(gated(normed(x, weights.norm)[0], weights.gate, weights.up), [weights.down], residual=x)
