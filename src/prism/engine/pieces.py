"""The pieces of a layer around its mixer, and how they are trained on a GPU: few passes over memory, and little kept.

    residual_norm   s = x + delta,   y = RMSNorm(s) in autocast's dtype
    residual_sum    x + delta
    swiglu          down(silu(gate x) ⊙ up x)
    gated_norm      RMSNorm(o) ⊙ silu(g), per head
    gated_output    out(RMSNorm(o) ⊙ silu(g)), or ⊙ σ(g), per head
    products        x W₁ᵀ, x W₂ᵀ …, a short convolution of x, and x: the gradient of x is summed inside the products of the
                    backward pass
    widened         y's columns in parts, some of them mapped: the gradients are computed in their places in y's

Each function is its definition in torch. In training on a GPU an autograd function takes its place, if every module in it is
an ordinary one without hooks: the same values up to rounding, from the kernels in engine/kernels/pieces.py. It keeps its
inputs and the outputs of large products; the backward pass computes their gated product again. With `recomputing`
(engine/recompute.py) the norms' results are not kept either, and the definitions keep as little. Compiled code, dispatch
modes and function transforms take the definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import compat
from prism.engine.fused import short_conv, use_kernel
from prism.engine.recompute import cheap, replaceable

WIDEST_ROW, WIDEST_HEAD = 8192, 4096
"""Widths up to which the kernels serve a norm over a row of a layer's input, and over a head."""


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype if autocast is on: one cast here instead of one for every linear map that reads x."""
    return x.to(_autocast_dtype(x))


def residual_norm(x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + delta `[…, D]` (x without delta), and its norm for the maps that read it, in autocast's dtype."""
    if _serves(x) and _plain_norm(norm, x.shape[-1], WIDEST_ROW):
        s, y = _ResidualNorm.apply(x, delta, norm.weight, norm.eps, _autocast_dtype(x))
        return s, replaceable(y, partial(_normed, norm=norm, dtype=y.dtype), s)
    s = x if delta is None else x + delta
    return s, replaceable(to_autocast_dtype(norm(s)), lambda z: to_autocast_dtype(norm(z)), s)


def residual_sum(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta `[…, D]`. For a sum of two dtypes torch takes twice as long as memory allows."""
    if x.dtype == torch.float32 != delta.dtype and x.shape == delta.shape and x.shape[-1] <= WIDEST_ROW and _serves(x):
        s: Tensor = _ResidualSum.apply(x, delta)
        return s
    return x + delta


def swiglu(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """`[…, D]` → `[…, D]`: down(silu(gate x) ⊙ up x)."""
    if _serves(x) and x.dtype == _autocast_dtype(x) and all(map(plain_linear, (gate, up, down))):
        y: Tensor = _SwiGLU.apply(x, gate.weight, up.weight, down.weight)
        return y
    (h,), _ = cheap(lambda g, u: ((F.silu(g) * u,), None), gate(x), up(x))
    return down(h)


def gated_norm_serves(o: Tensor, g: Tensor, weight: Tensor) -> bool:
    """Whether `gated_norm` computes these rows: on a GPU, with and without gradients."""
    plain = type(weight) in (Tensor, nn.Parameter) and o.shape == g.shape and o.shape[-1] <= WIDEST_HEAD
    if not plain or torch.compiler.is_compiling() or o.numel() == 0 or not use_kernel(o):
        return False
    return not compat.in_dispatch_mode() and not compat.transforms_active(o)


def gated_norm(o: Tensor, g: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o, g `[…, V]`, weight `[V]` → RMSNorm(o) ⊙ silu(g) in o's dtype, where `gated_norm_serves`."""
    y: Tensor = _GatedNorm.apply(o, g, weight, eps)
    return y


def gated_output(
    o: Tensor, g: Tensor, norm: Callable[[Tensor, Tensor], Tensor], inner: nn.Module, out: nn.Module, by: str = "silu"
) -> Tensor:
    """The output map of a gated norm: o `[…, H, V]`, g `[…, H·V]` → out(norm(o, silu(g))), or with σ(g).

    Args:
        norm: the gated norm itself; `inner` is the RMSNorm over a head's values that it applies.
        by: `"silu"` or `"sigmoid"`.
    """
    by_sigmoid = by == "sigmoid"
    fits = o.dtype == g.dtype == _autocast_dtype(g) and o.shape[-2] * o.shape[-1] == g.shape[-1]
    if _serves(o) and fits and plain_linear(out) and _plain_norm(inner, o.shape[-1], WIDEST_HEAD):
        y: Tensor = _GatedOutput.apply(o, g, inner.weight, inner.eps, out.weight, by_sigmoid)
        return y
    (y,), _ = cheap(lambda o, g: ((norm(o, g.sigmoid() if by_sigmoid else F.silu(g)),), None), o, g)
    return out(y)


def products_serve(x: Tensor) -> bool:
    """Whether `products` of x sums its gradient inside the products."""
    return _serves(x) and x.dtype == _autocast_dtype(x)


class Convolution(NamedTuple):
    """A short convolution with SiLU and without a bias, as in `short_conv`. Its conv state gets no gradient."""

    taps: Tensor  # [W, D]
    window: Tensor | None
    documents: Tensor | None  # int32


def products(
    x: Tensor, *weights: Tensor, conv: Convolution | None = None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """x `[…, D]` and weights `[N_i, D]` → x W_iᵀ `[…, N_i]` for each weight, x itself for everything else that reads it, and
    its convolution `[B, T, D]`.

    The gradients of x by each of these, and by all readers of the x that is returned, are otherwise summed by autograd, which
    reads and writes all of them once more.
    """
    if products_serve(x):
        *found, same, convolved = _Products.apply(x, *(conv or (None, None, None)), *weights)
        return found, same, convolved
    convolved = None if conv is None else short_conv(x, conv.taps, None, conv.window, conv.documents)
    return [F.linear(x, w) for w in weights], x, convolved


def widened(y: Tensor, sizes: list[int], weights: list[Tensor | None]) -> list[Tensor]:
    """y `[…, N]` in parts of these sizes, which leave out the last columns if they sum up to less than N; part i with a weight
    `[M_i, size_i]` is mapped by it, `[…, M_i]`: the second halves of low-rank maps."""
    if products_serve(y):
        return list(_Widened.apply(y, sizes, *weights))
    parts = y.split([*sizes, y.shape[-1] - sum(sizes)], -1)
    return [part if w is None else F.linear(part, w) for part, w in zip(parts, weights, strict=False)]


def plain_linear(m: nn.Module) -> bool:
    """Whether m computes x Wᵀ with an ordinary tensor W: quantised and sharded weights are of other classes."""
    plain = type(m) is nn.Linear and m.bias is None and type(m.weight) in (Tensor, nn.Parameter)
    return plain and compat.is_unmodified(m)


def _plain_norm(m: nn.Module, width: int, widest: int) -> bool:
    """Whether m is an RMSNorm with an epsilon over rows of this width."""
    plain = type(m) is nn.RMSNorm and m.eps is not None and tuple(m.normalized_shape) == (width,) and width <= widest
    if not plain or not compat.is_unmodified(m):
        return False
    return m.weight is not None and type(m.weight) in (Tensor, nn.Parameter)


def _serves(x: Tensor) -> bool:
    """Whether the functions below may compute on x: in training on a GPU, where nothing else watches or transforms it."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or x.numel() == 0 or not use_kernel(x):
        return False
    return not compat.in_dispatch_mode() and not compat.transforms_active(x)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype on x's device if autocast is on, otherwise x's own. The meta device has no autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else x.dtype


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
    from prism.engine.kernels.short_conv import short_conv_backward

    d_x, d_taps, _ = short_conv_backward(d_y, x, taps, None, window, documents, True)
    return d_x, d_taps


def _normed(s: Tensor, norm: Any, dtype: torch.dtype) -> Tensor:
    """The norm of a sum that was computed before."""
    from prism.engine.kernels import pieces as kernel

    return kernel.residual_norm(_rows(s, s.shape[-1]), None, norm.weight, norm.eps, dtype)[1].view(s.shape)


class _ResidualNorm(torch.autograd.Function):
    """Keeps s; its norm is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from prism.engine.kernels import pieces as kernel

        D = x.shape[-1]
        s, y = kernel.residual_norm(_rows(x, D), None if delta is None else _rows(delta, D), weight, eps, dtype)
        ctx.save_for_backward(s, weight)
        ctx.eps, ctx.delta = eps, None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return x.view_as(x) if delta is None else s.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_s: Tensor | None, d_y: Tensor | None) -> tuple[Tensor | None, ...]:
        from prism.engine.kernels import pieces as kernel

        _refuse_second_derivatives()
        s, weight = ctx.saved_tensors
        if d_y is None:
            return d_s, None if d_s is None or ctx.delta is None else d_s.to(ctx.delta), None, None, None
        D = s.shape[-1]
        above = None if d_s is None else _rows(d_s, D)
        d_x, d_delta, d_weight = kernel.residual_norm_backward(s, weight, above, _rows(d_y, D), ctx.eps, ctx.delta)
        shaped = d_x.view(d_y.shape), None if d_delta is None else d_delta.view(d_y.shape)
        return *shaped, d_weight, None, None


class _ResidualSum(torch.autograd.Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor) -> Tensor:
        from prism.engine.kernels import pieces as kernel

        ctx.dtype = delta.dtype
        return kernel.residual_sum(_rows(x, x.shape[-1]), _rows(delta, x.shape[-1])).view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_s: Tensor) -> tuple[Tensor, Tensor]:
        return d_s, d_s.to(ctx.dtype)


class _SwiGLU(torch.autograd.Function):
    """Keeps x, both projections in one tensor, and the weights in x's dtype; the product is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        from prism.engine.kernels import pieces as kernel

        flat, both = _rows(x, x.shape[-1]), torch.cat([gate.to(x.dtype), up.to(x.dtype)])
        gu, back = flat @ both.T, down.to(x.dtype)
        ctx.save_for_backward(flat, gu, both, back)
        ctx.dtypes, ctx.sizes = (gate.dtype, up.dtype, down.dtype), (len(gate), len(up))
        return (kernel.product(gu) @ back.T).view(*x.shape[:-1], len(back))

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from prism.engine.kernels import pieces as kernel

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


class _GatedNorm(torch.autograd.Function):
    """Keeps o and g."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor, weight: Tensor, eps: float) -> Tensor:
        from prism.engine.kernels import pieces as kernel

        rows, gates = _rows(o, o.shape[-1]), _rows(g, g.shape[-1])
        ctx.save_for_backward(rows, gates, weight)
        ctx.eps = eps
        return kernel.gated_norm(rows, gates, weight, eps).view(o.shape)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from prism.engine.kernels import pieces as kernel

        _refuse_second_derivatives()
        o, g, weight = ctx.saved_tensors
        d_o, d_g, _, d_weight = kernel.gated_norm_backward(o, g, weight, _rows(d_y, o.shape[-1]), ctx.eps)
        return d_o.view(d_y.shape), d_g.view(d_y.shape), d_weight, None


class _GatedOutput(torch.autograd.Function):
    """Keeps o, g and the weight in o's dtype; the gated norm is computed again."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, g: Tensor, weight: Tensor, eps: float, out: Tensor, by_sigmoid: bool) -> Tensor:
        from prism.engine.kernels import pieces as kernel

        V, back = o.shape[-1], out.to(o.dtype)
        rows, gates = _rows(o, V), _rows(g, V)
        ctx.save_for_backward(rows, gates, weight, back)
        ctx.eps, ctx.shapes, ctx.dtype, ctx.by_sigmoid = eps, (o.shape, g.shape), out.dtype, by_sigmoid
        y = kernel.gated_norm(rows, gates, weight, eps, by_sigmoid).view(-1, g.shape[-1])
        return (y @ back.T).view(*g.shape[:-1], len(back))

    @staticmethod
    def backward(ctx: Any, d_z: Tensor) -> tuple[Tensor | None, ...]:
        from prism.engine.kernels import pieces as kernel

        _refuse_second_derivatives()
        o, g, weight, back = ctx.saved_tensors
        flat = _rows(d_z, len(back))
        d_y = (flat @ back).view(o.shape)
        d_o, d_g, y, d_weight = kernel.gated_norm_backward(o, g, weight, d_y, ctx.eps, ctx.by_sigmoid)
        d_out = _weight_gradient(flat, y.view(-1, back.shape[1]), ctx.dtype) if ctx.needs_input_grad[4] else None
        return d_o.view(ctx.shapes[0]), d_g.view(ctx.shapes[1]), d_weight, None, d_out, None


class _Products(torch.autograd.Function):
    """Keeps x, the convolution's inputs, and the weights in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taps: Tensor | None, window: Tensor | None, documents: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        flat, cast = _rows(x, x.shape[-1]), [w.to(x.dtype) for w in weights]
        ctx.save_for_backward(flat, taps, window, documents, *cast)
        ctx.shape, ctx.dtypes = x.shape, [w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        convolved = None if taps is None else short_conv(x, taps, None, window, documents)
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


class _Widened(torch.autograd.Function):
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
