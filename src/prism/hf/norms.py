"""Norms and scaled rows of layers with a memory on a CPU, with fewer passes over the tokens than autograd makes.

    unit rows:  scale · x / sqrt(Σx² + ε)
    RMS norm:   norm(x) ⊙ w                                                             norm(x) = x / sqrt(mean x² + ε)
    gated norm: norm(x) ⊙ w ⊙ silu(gate)   or, gate first,   norm(x ⊙ silu(gate)) ⊙ w

Both directions run over spans of rows so short that they stay in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.compat import have_tangents, transforms_active
from prism.engine.layer_ops import UNIT_EPS

_SPAN = 2**20
"""Numbers of a span. Measured: shorter ones cost more calls, longer ones outgrow the cache."""
_FEW = 2**18
"""Of fewer numbers, one operation after the other is faster in a forward pass."""
_SMALL = 2**13
"""Of fewer numbers a call costs more than a pass over them."""


def unit_rows(x: Tensor, scale: float) -> Tensor:
    """`scale` x / sqrt(Σx² + ε) over the last dimension."""
    if not torch.is_grad_enabled() or traced(x):
        return _unit(x, scale)
    return _UnitRows.apply(x, scale)


def serves(x: Tensor, *others: Tensor) -> bool:
    """Whether `gated_norm` computes what transformers does, faster."""
    return x.numel() >= _SMALL and in_float32(x, *others)


def in_float32(*given: Tensor) -> bool:
    """Whether all are in float32 on a CPU: in half precision transformers' intermediate roundings differ."""
    return {(z.dtype, z.is_cpu) for z in given} == {(torch.float32, True)}  # for one token faster than `all`


def gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool = False) -> Tensor:
    """RMS norm over the last dimension, times silu(gate) before or after it.

    Args:
        x, gate: `[…, D]`; without a gate nothing is multiplied.
        weight: `[D]`, or `[n, D/n]` for n groups of channels.
        eps: added to the mean square.
        gate_first: norm(x ⊙ silu(gate)) instead of norm(x) ⊙ silu(gate).
    """
    opened = None if gate is None else gate.reshape(-1, *weight.shape)
    given = x.reshape(-1, *weight.shape), opened, weight, eps, gate_first
    if traced(x, weight):
        return _gated_norm(*given).view(x.shape)
    return (_GatedNorm.apply if torch.is_grad_enabled() else gated_norm_forward)(*given).view(x.shape)


def rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the `forward` of a norm without a gate, norm(x) ⊙ w."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if not in_float32(hidden_states, weight):
            return original(self, hidden_states)
        if _is_short(hidden_states):
            return _unit_mean(hidden_states, self.variance_epsilon) * weight
        return gated_norm(hidden_states, None, weight, self.variance_epsilon)

    return forward


def centred_rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the `forward` of a norm whose weight is stored minus 1, norm(x) ⊙ (1 + w)."""

    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if not in_float32(x, weight):
            return original(self, x)
        if _is_short(x):
            unit = _unit_mean(x, self.eps)
            return torch.addcmul(unit, unit, weight)
        return gated_norm(x, None, 1.0 + weight, self.eps)

    return forward


def _is_short(x: Tensor) -> bool:
    """Whether a norm's few operations, one by one, cost less than the preparation of spans."""
    return x.numel() < (_SMALL if torch.is_grad_enabled() else _FEW)


def _unit_mean(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x² + ε)."""
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def traced(*given: Tensor) -> bool:
    """Whether a compiler or a transform follows the operations: autograd functions are not for them."""
    return torch.compiler.is_compiling() or have_tangents(*given) or transforms_active(*given)


def _unit(x: Tensor, scale: float) -> Tensor:
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) * scale)


def _gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    before, after = (gate, None) if gate_first else (None, gate)
    x = x if before is None else x * F.silu(before)
    x = F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    return x if after is None else x * F.silu(after)


def spans(x: Tensor) -> Iterator[slice]:
    """Spans of the first dimension, so short that a few tensors like x stay in the cache."""
    rows = max(1, _SPAN * len(x) // max(1, x.numel()))
    return (slice(start, start + rows) for start in range(0, len(x), rows))


def inverse_length(x: Tensor, count: int, eps: float) -> Tensor:
    """1 / sqrt(Σx² / count + ε) over the last dimension."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(count).add_(eps).rsqrt_()


def gated_norm_forward(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """norm(x) as in `gated_norm`, with temporaries of one span; x and gate `[n, *weight.shape]`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows in spans(x):
        y, opened = out[rows], None if gate is None else F.silu(gate[rows])
        h = x[rows] if opened is None or not gate_first else torch.mul(x[rows], opened, out=y)
        torch.mul(h, inverse_length(h, h.shape[-1], eps), out=y).mul_(weight)
        if opened is not None and not gate_first:
            y.mul_(opened)
    return out


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        inverse = inverse_length(x, 1, UNIT_EPS)
        ctx.scale = scale
        ctx.save_for_backward(x, inverse)
        return x * (inverse * scale)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return torch.autograd.grad(_unit(x, ctx.scale), x, d_y, create_graph=True)[0], None
        d_x = torch.empty_like(d_y)
        for b in range(len(x)):  # x is a part of a wider tensor: flattened it would be copied
            for rows in spans(x[b]):
                here, d_here, inverse_here = x[b, rows], d_y[b, rows], inverse[b, rows]
                along = (d_here * here).sum(-1, keepdim=True).mul_(inverse_here.pow(3)).mul_(ctx.scale)
                found = torch.mul(d_here, inverse_here * ctx.scale, out=d_x[b, rows])
                found.addcmul_(here, along, value=-1)
        return d_x, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        ctx.eps, ctx.gate_first = eps, gate_first
        ctx.save_for_backward(x, gate, weight)
        return gated_norm_forward(x, gate, weight, eps, gate_first)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, gate, weight) if z is not None and z.requires_grad]
            again = _gated_norm(x, gate, weight, ctx.eps, ctx.gate_first)
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            given = [next(found) if z is not None and z.requires_grad else None for z in (x, gate, weight)]
            return (*given, None, None)
        return (*gated_norm_back(x, gate, weight, ctx.eps, ctx.gate_first, d_out), None, None)


def gated_norm_back(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool, d_out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of x, gate and weight; x, gate and d_out `[n, *weight.shape]`."""
    d_x, d_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
    d_weight = torch.zeros_like(weight)
    for rows in spans(x):
        opened = None if gate is None else F.silu(gate[rows])
        d_opened = _span_back(x[rows], opened, weight, eps, gate_first, d_out[rows], d_x[rows], d_weight)
        if gate is not None and d_gate is not None:
            torch.ops.aten.silu_backward.grad_input(d_opened, gate[rows], grad_input=d_gate[rows])
    return d_x, d_gate, d_weight


def _span_back(
    x: Tensor,
    opened: Tensor | None,
    weight: Tensor,
    eps: float,
    gate_first: bool,
    d_y: Tensor,
    d_x: Tensor,
    d_weight: Tensor,
) -> Tensor | None:
    """Write d_x, add to d_weight and return the gradient of `opened`, silu(gate), for one span of rows."""
    before, after = (opened, None) if gate_first else (None, opened)
    h = x if before is None else x * before
    inverse = inverse_length(h, h.shape[-1], eps)
    product = h * d_y
    d_unit, along = (d_y, product) if after is None else (d_y * after, product * after)
    if weight.ndim == 1:  # sums as products with a vector: no tensor to write
        d_weight.addmv_(along.t(), inverse.squeeze(-1))
        mean = (along @ weight).unsqueeze(-1)
    else:
        d_weight += (along * inverse).sum(0)
        mean = (along * weight).sum(-1, keepdim=True)
    mean.mul_(inverse.pow(3)).div_(h.shape[-1])
    d_h = torch.mul(d_unit, weight, out=d_x).mul_(inverse).addcmul_(h, mean, value=-1)
    if before is None:
        return None if after is None else product.mul_(weight).mul_(inverse)
    d_opened = d_h * x
    d_h.mul_(before)
    return d_opened


def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """x `[B, T, H, V]` times `scale` `[B, T, H]`."""
    if not torch.is_grad_enabled() or traced(x, scale):
        return x * scale.unsqueeze(-1)
    return _ScaledRows.apply(x, scale)


def add_scaled(y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """y + scale ⊙ x, which may overwrite y: `[B, T, H, V]`, scale `[H]` or `[H, V]`."""
    scale = scale.unsqueeze(-1) if scale.ndim == 1 else scale
    if not torch.is_grad_enabled() or traced(y, x, scale):
        return torch.addcmul(y, x, scale)
    return _AddScaled.apply(y, x, scale)


class _ScaledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return d_y * scale.unsqueeze(-1), (d_y * x).sum(-1)
        d_x, d_scale = torch.empty_like(d_y), torch.empty_like(scale)
        for b in range(len(x)):
            for rows in spans(x[b]):
                torch.mul(d_y[b, rows], scale[b, rows].unsqueeze(-1), out=d_x[b, rows])
                torch.sum(d_y[b, rows] * x[b, rows], -1, out=d_scale[b, rows])
        return d_x, d_scale


class _AddScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.mark_dirty(y)
        return y.addcmul_(x, scale)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return d_y, d_y * scale, (d_y * x).sum((0, 1)).sum_to_size(scale.shape)
        d_scale = torch.zeros_like(x[0, 0])
        for b in range(len(x)):
            for rows in spans(x[b]):
                d_scale += (d_y[b, rows] * x[b, rows]).sum(0)
        return d_y, d_y * scale, d_scale.sum_to_size(scale.shape)
