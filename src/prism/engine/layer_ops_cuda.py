"""The autograd functions of layer_ops.py for training on a GPU: few passes over memory, and little kept.

Each gives the same values as its definition in torch up to rounding, from kernels/ops/layer_ops.py. It keeps its
inputs and the outputs of large products; the backward pass computes their gated product again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.engine.kernels.ops import layer_ops as kernel
from prism.engine.kernels.ops.short_conv import short_conv, short_conv_backward


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # create_graph=True
        raise NotImplementedError(
            "the Triton kernels have no second derivatives: run the forward pass in "
            "`with prism.engine.using(backend='torch'):`, which has them"
        )


def _rows(x: Tensor, width: int) -> Tensor:
    """`[…, width]` as `[M, width]`, contiguous."""
    return x.reshape(-1, width).contiguous()


def _weight_gradient(d_y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of y = x Wᵀ by W, `[M, N]`, `[M, D]` → `[N, D]`, in W's dtype."""
    if dtype == torch.float32 != x.dtype and x.is_cuda:  # without rounding it to half precision
        return torch.mm(d_y.T, x, out_dtype=dtype)
    return torch.mm(d_y.T, x).to(dtype)


def _conv_gradients(
    d_y: Tensor, x: Tensor, taps: Tensor, window: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of a short convolution with SiLU by x, a new tensor, and by its taps."""
    d_x, d_taps, _ = short_conv_backward(d_y, x, taps, None, window, documents, True)
    return d_x, d_taps


def normed(s: Tensor, norm: Any, dtype: torch.dtype) -> Tensor:
    """The norm of a sum that was computed before."""
    return kernel.residual_norm(_rows(s, s.shape[-1]), None, norm.weight, norm.eps, dtype)[1].view(s.shape)


class ResidualNorm(torch.autograd.Function):
    """Keeps s; its norm is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        D = x.shape[-1]
        s, y = kernel.residual_norm(_rows(x, D), None if delta is None else _rows(delta, D), weight, eps, dtype)
        ctx.save_for_backward(s, weight)
        ctx.eps, ctx.delta = eps, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return x.view_as(x) if delta is None else s.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_s: Tensor | None, d_y: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        s, weight = ctx.saved_tensors
        if d_y is None:
            return d_s, None if d_s is None or ctx.delta is None else d_s.to(ctx.delta), None, None, None
        D = s.shape[-1]
        above = None if d_s is None else _rows(d_s, D)
        d_x, d_delta, d_weight = kernel.residual_norm_backward(s, weight, above, _rows(d_y, D), ctx.eps, ctx.delta)
        shaped = d_x.view(d_y.shape), None if d_delta is None else d_delta.view(d_y.shape)
        return *shaped, d_weight, None, None


class ResidualSum(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor) -> Tensor:
        ctx.dtype = delta.dtype
        return kernel.residual_sum(_rows(x, x.shape[-1]), _rows(delta, x.shape[-1])).view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_s: Tensor) -> tuple[Tensor, Tensor]:
        return d_s, d_s.to(ctx.dtype)


class SwiGLU(torch.autograd.Function):
    """Keeps x, both projections in one tensor, and the weights in x's dtype; the product is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        flat, both = _rows(x, x.shape[-1]), torch.cat([gate.to(x.dtype), up.to(x.dtype)])
        gu, back = flat @ both.T, down.to(x.dtype)
        ctx.save_for_backward(flat, gu, both, back)
        ctx.dtypes, ctx.sizes = (gate.dtype, up.dtype, down.dtype), (len(gate), len(up))
        return (kernel.product(gu) @ back.T).view(*x.shape[:-1], len(back))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        x, gu, both, back = ctx.saved_tensors
        wants, (of_gate, of_up, of_down) = ctx.needs_input_grad, ctx.dtypes
        flat = _rows(d_y, len(back))
        d_gu, h = kernel.product_backward(gu, flat @ back)
        d_down = _weight_gradient(flat, h, of_down) if wants[3] else None
        del h
        d_x = d_gate = d_up = None
        if wants[0]:
            d_x = (d_gu @ both).view(*d_y.shape[:-1], x.shape[-1])
        if wants[1] or wants[2]:
            d_gate, d_up = _weight_gradient(d_gu, x, of_gate).split(ctx.sizes)
        return d_x, d_gate if wants[1] else None, d_up.to(of_up) if wants[2] and d_up is not None else None, d_down


class GatedNorm(torch.autograd.Function):
    """Keeps o and g."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, gates = _rows(o, o.shape[-1]), _rows(g, g.shape[-1])
        ctx.save_for_backward(rows, gates, weight)
        ctx.eps = eps
        return kernel.gated_norm(rows, gates, weight, eps).view(o.shape)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        o, g, weight = ctx.saved_tensors
        d_o, d_g, _, d_weight = kernel.gated_norm_backward(o, g, weight, _rows(d_y, o.shape[-1]), ctx.eps)
        return d_o.view(d_y.shape), d_g.view(d_y.shape), d_weight, None


class GatedOutput(torch.autograd.Function):
    """Keeps o, g and the weight in o's dtype; the gated norm is computed again."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor, weight: Tensor, eps: float, out: Tensor, by_sigmoid: bool) -> Tensor:
        V, back = o.shape[-1], out.to(o.dtype)
        rows, gates = _rows(o, V), _rows(g, V)
        ctx.save_for_backward(rows, gates, weight, back)
        ctx.eps, ctx.shapes, ctx.dtype, ctx.by_sigmoid = eps, (o.shape, g.shape), out.dtype, by_sigmoid
        y = kernel.gated_norm(rows, gates, weight, eps, by_sigmoid).view(-1, g.shape[-1])
        return (y @ back.T).view(*g.shape[:-1], len(back))

    @staticmethod
    def backward(ctx: Any, d_z: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        o, g, weight, back = ctx.saved_tensors
        flat = _rows(d_z, len(back))
        d_y = (flat @ back).view(o.shape)
        d_o, d_g, y, d_weight = kernel.gated_norm_backward(o, g, weight, d_y, ctx.eps, ctx.by_sigmoid)
        d_out = _weight_gradient(flat, y.view(-1, back.shape[1]), ctx.dtype) if ctx.needs_input_grad[4] else None
        return d_o.view(ctx.shapes[0]), d_g.view(ctx.shapes[1]), d_weight, None, d_out, None


class Products(torch.autograd.Function):
    """Keeps x, the convolution's inputs, and the weights in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taps: Tensor | None, window: Tensor | None, documents: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        flat, cast = _rows(x, x.shape[-1]), [w.to(x.dtype) for w in weights]
        ctx.save_for_backward(flat, taps, window, documents, *cast)
        ctx.shape, ctx.dtypes = x.shape, [w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        before = None if window is None else window.to(x.dtype)
        convolved = None if taps is None else short_conv(x, taps, None, before, documents, True)
        return *((flat @ w.T).view(*x.shape[:-1], len(w)) for w in cast), x.view_as(x), convolved

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        x, taps, window, documents, *weights = ctx.saved_tensors
        *d_ys, d_same, d_convolved = d_outputs
        rows = [None if d is None else _rows(d, len(w)) for d, w in zip(d_ys, weights, strict=True)]
        d_x, d_taps, own = None if d_same is None else _rows(d_same, x.shape[-1]), None, False
        if d_convolved is not None:
            d_own, d_taps = _conv_gradients(d_convolved, x.view(ctx.shape), taps, window, documents)
            d_x, own = d_own.view(x.shape) if d_x is None else d_own.view(x.shape).add_(d_x), True
        for d, w in zip(rows, weights, strict=True):
            if d is not None and ctx.needs_input_grad[0]:
                # What autograd hands over may be used elsewhere, so only our own sum is added to in place.
                d_x = d @ w if d_x is None else d_x.addmm_(d, w) if own else torch.addmm(d_x, d, w)
                own = True
        wanted = zip(rows, ctx.dtypes, ctx.needs_input_grad[4:], strict=True)
        d_weights = [_weight_gradient(d, x, dtype) if d is not None and wants else None for d, dtype, wants in wanted]
        return None if d_x is None else d_x.view(ctx.shape), d_taps, None, None, *d_weights


class Widened(torch.autograd.Function):
    """Keeps y, and the weights in y's dtype."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: list[int], *weights: Tensor | None) -> tuple[Tensor, ...]:
        flat, cast = _rows(y, y.shape[-1]), [None if w is None else w.to(y.dtype) for w in weights]
        ctx.save_for_backward(flat, *cast)
        ctx.shape, ctx.sizes, ctx.dtypes = y.shape, sizes, [None if w is None else w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        parts = flat.split([*sizes, flat.shape[1] - sum(sizes)], 1)
        found = [part.contiguous() if w is None else part @ w.T for part, w in zip(parts, cast, strict=False)]
        return tuple(z.view(*y.shape[:-1], z.shape[1]) for z in found)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        y, *weights = ctx.saved_tensors
        d_y, d_weights, start = torch.empty_like(y), [], 0
        given = zip(ctx.sizes, d_outputs, weights, ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        for size, d_out, w, dtype, wants in given:
            own, part = d_y[:, start : start + size], y[:, start : start + size]
            d = None if d_out is None else _rows(d_out, d_out.shape[-1])
            if d is None:  # nothing reads this part
                own.zero_()
            elif w is None:
                own.copy_(d)
            else:
                torch.mm(d, w, out=own)
            d_weights.append(_weight_gradient(d, part, dtype) if d is not None and wants else None)
            start += size
        d_y[:, start:].zero_()
        return d_y.view(ctx.shape), None, *d_weights
