"""Norms around the memories on a CPU, with fewer passes over the tokens than autograd makes.

    unit rows:  scale · x / sqrt(Σx² + ε)
    gated norm: norm(x) ⊙ w ⊙ silu(gate)   or, gate first,   norm(x ⊙ silu(gate)) ⊙ w        norm(x) = x / sqrt(mean x² + ε)

Both directions run over spans of rows so short that they stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.compat import have_tangents, transforms_active
from prism.engine.fused import UNIT_EPS

_CACHED = 2**17
"""Numbers of a span."""


def unit_rows(x: Tensor, scale: float) -> Tensor:
    """`scale` x / sqrt(Σx² + ε) over the last dimension."""
    if not torch.is_grad_enabled() or _traced(x):
        return _unit(x, scale)
    return _UnitRows.apply(x, scale)


def serves(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether `gated_norm` computes what transformers does: in half precision its intermediate roundings differ."""
    return all(z.dtype == torch.float32 and z.device.type == "cpu" for z in (x, gate, weight))


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """RMS norm over the last dimension, times silu(gate) before or after it. x and gate `[…, D]`, weight `[D]` or `[n, D]`."""
    given = x.reshape(-1, *weight.shape), gate.reshape(-1, *weight.shape), weight, eps, gate_first
    if torch.is_grad_enabled():
        y = _gated_norm(*given) if _traced(x, gate, weight) else _GatedNorm.apply(*given)
    else:
        y = _gated_norm(*given) if x.numel() <= _CACHED else _in_spans(*given)
    return y.view(x.shape)


def _traced(*given: Tensor) -> bool:
    return torch.compiler.is_compiling() or have_tangents(*given) or transforms_active(*given)


def _unit(x: Tensor, scale: float) -> Tensor:
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) * scale)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    x = x * F.silu(gate) if gate_first else x
    x = F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    return x if gate_first else x * F.silu(gate)


def _spans(x: Tensor) -> Iterator[slice]:
    """Spans of the first dimension."""
    rows = max(1, _CACHED * len(x) // max(1, x.numel()))
    return (slice(start, start + rows) for start in range(0, len(x), rows))


def _inverse_length(x: Tensor, count: int, eps: float) -> Tensor:
    """1 / sqrt(Σx² / count + ε) over the last dimension."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(count).add_(eps).rsqrt_()


def _in_spans(x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """`_gated_norm`, with temporaries of one span."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows in _spans(x):
        opened, y = F.silu(gate[rows]), out[rows]
        if gate_first:
            torch.mul(x[rows], opened, out=y)
            y.mul_(_inverse_length(y, y.shape[-1], eps)).mul_(weight)
        else:
            torch.mul(x[rows], _inverse_length(x[rows], y.shape[-1], eps), out=y)
            y.mul_(weight).mul_(opened)
    return out


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        inverse = _inverse_length(x, 1, UNIT_EPS)
        ctx.scale = scale
        ctx.save_for_backward(x, inverse)
        return x * (inverse * scale)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return torch.autograd.grad(_unit(x, ctx.scale), x, d_y, create_graph=True)[0], None
        along = (d_y * x).sum(-1, keepdim=True) * inverse.pow(3) * ctx.scale
        return (d_y * (inverse * ctx.scale)).addcmul_(x, along, value=-1), None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        ctx.eps, ctx.gate_first = eps, gate_first
        ctx.save_for_backward(x, gate, weight)
        return _in_spans(x, gate, weight, eps, gate_first)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, gate, weight) if z.requires_grad]
            again = _gated_norm(x, gate, weight, ctx.eps, ctx.gate_first)
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            return (*[next(found) if z.requires_grad else None for z in (x, gate, weight)], None, None)
        d_x, d_gate, d_weight = torch.empty_like(x), torch.empty_like(gate), torch.zeros_like(weight)
        for rows in _spans(x):
            opened, d_y = F.silu(gate[rows]), d_out[rows]
            h = x[rows] * opened if ctx.gate_first else x[rows]
            inverse = _inverse_length(h, h.shape[-1], ctx.eps)
            unit = h * inverse
            d_unit = d_y if ctx.gate_first else d_y * opened
            along = unit * d_unit
            d_weight += along.sum(0)
            d_unit = d_unit * weight
            mean = along.mul_(weight).mean(-1, keepdim=True)
            d_h = d_unit.addcmul_(unit, mean, value=-1).mul_(inverse)
            if ctx.gate_first:
                torch.mul(d_h, opened, out=d_x[rows])
                d_opened = d_h.mul_(x[rows])
            else:
                d_x[rows] = d_h
                d_opened = unit.mul_(weight).mul_(d_y)
            torch.ops.aten.silu_backward.grad_input(d_opened, gate[rows], grad_input=d_gate[rows])
        return d_x, d_gate, d_weight, None, None
