"""Online gradient descent of a two-layer network in one kernel: the serial form of TTT-MLP.

A program runs one head of one sequence, token by token, with the weights in registers from the first token to the last. W1 is
`[D, M]`, and W2 is held transposed as `[D, M]` too, so that every product with a vector is a sum over rows or columns of such
a tile. The backward runs from the last token to the first. It does not store every token's weights: a step is undone by
adding back what it subtracted, W_{t-1} = W_t + c (rank one), and where an equation needs W_{t-1} it uses W_t and one more dot
product.

Token tensors are `[B, T, H, D]`, tensors saved for the backward `[B, T, H, ·]`, weights `[B, H, D, M]`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard

WARPS = 8
"""The fastest of 4 to 32 on an H200, forward and backward."""
EPS = tl.constexpr(1e-6)


@triton.jit
def _tanh(x):
    # In terms of e^{-2|x|}, which cannot overflow.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _gelu(x):
    """Tanh GELU with its first and second derivatives."""
    a: tl.constexpr = 0.7978845608028654
    b: tl.constexpr = 0.044715
    square = x * x
    t = _tanh(a * x * (1.0 + b * square))
    du = a * (1.0 + 3.0 * b * square)
    sech = 1.0 - t * t
    value = 0.5 * x * (1.0 + t)
    first = 0.5 * (1.0 + t) + 0.5 * x * sech * du
    second = sech * du + 0.5 * x * (sech * (6.0 * a * b * x) - 2.0 * t * sech * du * du)
    return value, first, second


@triton.jit
def _error(z, target, scale, shift, D: tl.constexpr, NORM: tl.constexpr):
    """δ = ∂½‖[LN](z) - target‖²/∂z, and what the derivative of δ needs: normalised z, 1/σ, the error, its gradient."""
    if NORM:
        centred = z - tl.sum(z, 0) / D
        inverse = tl.rsqrt(tl.sum(centred * centred, 0) / D + EPS)
        normal = centred * inverse
        error = normal * scale + shift - target
        h = error * scale
        delta = (h - tl.sum(h, 0) / D - normal * (tl.sum(h * normal, 0) / D)) * inverse
        return delta, normal, inverse, error, h
    else:
        error = z - target
        return error, z, 1.0, error, error


@triton.jit
def _token(k, q, target, rate, at, d, D: tl.constexpr):
    return tl.load(k + at * D + d), tl.load(q + at * D + d), tl.load(target + at * D + d), tl.load(rate + at)


@triton.jit
def serial_mlp_kernel(
    q, k, target, rate, scale, shift,
    w1, b1, w2, b2,
    out, end_w1, end_b1, end_w2, end_b2,
    saved_z1, saved_back, saved_z2, saved_asked,
    T, H,
    D: tl.constexpr, M: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H, row % H
    d, m = tl.arange(0, D), tl.arange(0, M)
    tile = row * D * M + d[:, None] * M + m[None, :]
    W1, W2 = tl.load(w1 + tile), tl.load(w2 + tile)
    B1, B2 = tl.zeros((M,), tl.float32), tl.zeros((D,), tl.float32)
    if BIAS:
        B1, B2 = tl.load(b1 + row * M + m), tl.load(b2 + row * D + d)
    gain, offset = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    if NORM:
        gain, offset = tl.load(scale + h * D + d), tl.load(shift + h * D + d)
    at = b * T * H + h
    x, y, aim, c = _token(k, q, target, rate, at, d, D)
    for t in range(T):
        # The next token is loaded while this one is computed.
        following = tl.where(t + 1 < T, at + H, at)
        next_x, next_y, next_aim, next_c = _token(k, q, target, rate, following, d, D)
        z1 = tl.sum(W1 * x[:, None], 0) + B1
        x2, slope, _ = _gelu(z1)
        z2 = tl.sum(W2 * x2[None, :], 1) + B2
        delta2, _, _, _, _ = _error(z2, aim, gain, offset, D, NORM)
        back = tl.sum(W2 * delta2[:, None], 0)
        delta1 = back * slope
        W1 -= (c * x)[:, None] * delta1[None, :]
        W2 -= (c * delta2)[:, None] * x2[None, :]
        if BIAS:
            B1 -= c * delta1
            B2 -= c * delta2
        asked = tl.sum(W1 * y[:, None], 0) + B1
        hidden, _, _ = _gelu(asked)
        tl.store(out + at * D + d, tl.sum(W2 * hidden[None, :], 1) + B2)
        if SAVE:
            tl.store(saved_z1 + at * M + m, z1)
            tl.store(saved_back + at * M + m, back)
            tl.store(saved_z2 + at * D + d, z2)
            tl.store(saved_asked + at * M + m, asked)
        at, x, y, aim, c = following, next_x, next_y, next_aim, next_c
    tl.store(end_w1 + tile, W1)
    tl.store(end_w2 + tile, W2)
    if BIAS:
        tl.store(end_b1 + row * M + m, B1)
        tl.store(end_b2 + row * D + d, B2)


@triton.jit
def serial_mlp_backward_kernel(
    q, k, target, rate, scale, shift,
    w1, w2,
    saved_z1, saved_back, saved_z2, saved_asked,
    d_out,
    d_w1, d_b1, d_w2, d_b2,
    d_q, d_k, d_target, d_rate, d_scale, d_shift,
    T, H,
    D: tl.constexpr, M: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`w1`, `w2`: a copy of the last weights, which becomes the first. `d_w1` …: gradients of the last weights, which become
    those of the first.

    Registers are scarce: only the gradient of W2 stays in them. Tiles are loaded again at each use (they are in the cache),
    and saved tensors are loaded, and their GELU computed, where they are used.
    """
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H, row % H
    d, m = tl.arange(0, D), tl.arange(0, M)
    tile = row * D * M + d[:, None] * M + m[None, :]
    A2 = tl.load(d_w2 + tile)
    a1, a2 = tl.zeros((M,), tl.float32), tl.zeros((D,), tl.float32)
    if BIAS:
        a1, a2 = tl.load(d_b1 + row * M + m), tl.load(d_b2 + row * D + d)
    gain, offset = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    d_gain, d_offset = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    if NORM:
        gain, offset = tl.load(scale + h * D + d), tl.load(shift + h * D + d)
    for i in range(T):
        at = (b * T + T - 1 - i) * H + h
        c = tl.load(rate + at)

        # The answer, from the weights after the step.
        g = tl.load(d_out + at * D + d)
        hidden, slope, _ = _gelu(tl.load(saved_asked + at * M + m))
        A2 += g[:, None] * hidden[None, :]
        d_asked = tl.sum(tl.load(w2 + tile) * g[:, None], 0) * slope
        tl.store(d_q + at * D + d, tl.sum(tl.load(w1 + tile) * d_asked[None, :], 1))
        if BIAS:
            a2 += g
            a1 += d_asked

        # The step W1 -= c x δ1ᵀ, W2 -= c δ2 x2ᵀ.
        A1 = tl.load(d_w1 + tile) + tl.load(q + at * D + d)[:, None] * d_asked[None, :]
        tl.store(d_w1 + tile, A1)
        x = tl.load(k + at * D + d)
        x2, slope, _ = _gelu(tl.load(saved_z1 + at * M + m))
        delta1 = tl.load(saved_back + at * M + m) * slope
        r1 = tl.sum(A1 * delta1[None, :], 1)
        d_delta1 = -c * (tl.sum(A1 * x[:, None], 0) + a1)
        z2 = tl.load(saved_z2 + at * D + d)
        delta2, normal, inverse, error, grad = _error(z2, tl.load(target + at * D + d), gain, offset, D, NORM)
        p2 = tl.sum(A2 * x2[None, :], 1) + a2
        d_delta2 = -c * p2
        d_x2 = -c * tl.sum(A2 * delta2[:, None], 0)
        tl.store(d_rate + at, -tl.sum(x * r1, 0) - tl.sum(a1 * delta1, 0) - tl.sum(delta2 * p2, 0))

        # The first layer of the gradient: δ1 = (W2ᵀ δ2) gelu'(z1), from the weights before the step.
        d_back = d_delta1 * slope
        A2 += delta2[:, None] * d_back[None, :]
        d_delta2 += tl.sum(tl.load(w2 + tile) * d_back[None, :], 1) + c * delta2 * tl.sum(x2 * d_back, 0)

        # The last layer of the gradient: δ2 from z2.
        if NORM:
            along = tl.sum(grad * normal, 0) / D
            u_along = tl.sum(d_delta2 * normal, 0) / D
            d_grad = inverse * (d_delta2 - tl.sum(d_delta2, 0) / D - normal * u_along)
            d_error = d_grad * gain
            d_gain += d_grad * error + d_error * normal
            d_offset += d_error
            d_normal = d_error * gain - inverse * (d_delta2 * along + grad * u_along)
            d_z2 = inverse * (d_normal - tl.sum(d_normal, 0) / D - normal * (tl.sum(d_normal * normal, 0) / D))
            d_z2 -= inverse * normal * (tl.sum(d_delta2 * delta2, 0) / D)
            tl.store(d_target + at * D + d, -d_error)
        else:
            d_z2 = d_delta2
            tl.store(d_target + at * D + d, -d_delta2)

        # The network on the key; then the step is undone.
        x2, slope, curve = _gelu(tl.load(saved_z1 + at * M + m))
        A2 += d_z2[:, None] * x2[None, :]
        W2 = tl.load(w2 + tile)
        d_x2 += tl.sum(W2 * d_z2[:, None], 0) + c * x2 * tl.sum(delta2 * d_z2, 0)
        tl.store(w2 + tile, W2 + (c * delta2)[:, None] * x2[None, :])
        back = tl.load(saved_back + at * M + m)
        d_z1 = d_delta1 * back * curve + d_x2 * slope
        x = tl.load(k + at * D + d)
        tl.store(d_w1 + tile, tl.load(d_w1 + tile) + x[:, None] * d_z1[None, :])
        W1 = tl.load(w1 + tile)
        d_x = tl.sum(W1 * d_z1[None, :], 1) + c * x * tl.sum(back * slope * d_z1, 0) - c * r1
        tl.store(d_k + at * D + d, d_x)
        tl.store(w1 + tile, W1 + (c * x)[:, None] * (back * slope)[None, :])
        if BIAS:
            a2 += d_z2
            a1 += d_z1
        tl.debug_barrier()
    tl.store(d_w2 + tile, A2)
    if BIAS:
        tl.store(d_b1 + row * M + m, a1)
        tl.store(d_b2 + row * D + d, a2)
    if NORM:
        tl.store(d_scale + row * D + d, d_gain)
        tl.store(d_shift + row * D + d, d_offset)


@torch.library.custom_op("prism::serial_mlp", mutates_args=())
def serial_mlp(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """z `[B, T, H, D]`, the last W1, W2, b1, b2 (empty if there are none), and the tensors saved for the backward."""
    made = _outputs(q, w1, w2, b1, b2, save)
    z, end1, end2, end_b1, end_b2, *saved = made
    w2_t = _transposed(w2)
    end = torch.empty_like(w2_t)
    B, T, H, D = q.shape
    with device_guard(q):
        serial_mlp_kernel[(B * H,)](
            *_contiguous(q, k, target, rate, scale, shift, w1, b1, w2_t, b2),
            z, end1, end_b1, end, end_b2, *saved, T, H,
            D=D, M=w1.shape[-1], NORM=scale is not None, BIAS=b1 is not None, SAVE=save, num_warps=WARPS,
        )  # fmt: skip
    end2.copy_(end.transpose(-1, -2))
    return made


@serial_mlp.register_fake
def _(q, k, target, rate, w1, w2, b1, b2, scale, shift, save):
    return _outputs(q, w1, w2, b1, b2, save)


def _outputs(
    q: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden = (*q.shape[:3], w1.shape[-1]) if save else (0,)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        w1.new_empty(w1.shape),
        w2.new_empty(w2.shape),
        q.new_empty((0,) if b1 is None else b1.shape),
        q.new_empty((0,) if b2 is None else b2.shape),
        q.new_empty(hidden),  # z1
        q.new_empty(hidden),  # W2ᵀδ2
        q.new_empty(q.shape if save else (0,)),  # z2
        q.new_empty(hidden),  # z1 of the query
    )


@torch.library.custom_op("prism::serial_mlp_backward", mutates_args=())
def serial_mlp_backward(
    d_z: Tensor,
    d_w1: Tensor,
    d_w2: Tensor,
    d_b1: Tensor | None,
    d_b2: Tensor | None,
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rate: Tensor,
    w1: Tensor,
    w2: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    z1: Tensor,
    back: Tensor,
    z2: Tensor,
    asked: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, target, rate, the first W1, W2, b1, b2, and of scale and shift. `w1`, `w2`: the last weights."""
    B, T, H, D = q.shape
    tokens = _contiguous(q, k, target, rate)
    d_tokens = [torch.empty_like(x) for x in tokens]
    first1, first2 = _copy(d_w1), _transposed(d_w2)
    first_b1, first_b2 = (None if x is None else _copy(x) for x in (d_b1, d_b2))
    d_scale, d_shift = (None if scale is None else q.new_empty(B, H, D) for _ in range(2))
    with device_guard(q):
        serial_mlp_backward_kernel[(B * H,)](
            *tokens, *_contiguous(scale, shift), _copy(w1), _transposed(w2), *_contiguous(z1, back, z2, asked, d_z),
            first1, first_b1, first2, first_b2, *d_tokens, d_scale, d_shift, T, H,
            D=D, M=w1.shape[-1], NORM=scale is not None, BIAS=d_b1 is not None, num_warps=WARPS,
        )  # fmt: skip
    none = q.new_empty(0)
    return (
        *d_tokens,
        first1,
        _transposed(first2),
        none if first_b1 is None else first_b1,
        none.clone() if first_b2 is None else first_b2,
        none.clone() if d_scale is None else d_scale.sum(0),
        none.clone() if d_shift is None else d_shift.sum(0),
    )  # type: ignore[return-value]  # ten tensors: mypy cannot count the starred ones


@serial_mlp_backward.register_fake
def _(d_z, d_w1, d_w2, d_b1, d_b2, q, k, target, rate, w1, w2, scale, shift, *saved):
    wanted = (q, k, target, rate, w1, w2, d_b1, d_b2, scale, shift)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, target, rate, _, _, b1, _, scale, shift, save = inputs
    _, w1, w2, _, _, *saved = output
    ctx.save_for_backward(q, k, target, rate, w1, w2, scale, shift, *saved)
    ctx.bias, ctx.saved = b1 is not None, save
    ctx.mark_non_differentiable(*saved)


def _differentiate(
    ctx: Any, d_z: Tensor, d_w1: Tensor, d_w2: Tensor, d_b1: Tensor, d_b2: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    if not ctx.saved:
        raise RuntimeError(
            "prism::serial_mlp was called with save=False, so nothing was saved for a backward: pass save=True"
        )
    biases = (d_b1, d_b2) if ctx.bias else (None, None)
    *grads, b1, b2, scale, shift = serial_mlp_backward(d_z, d_w1, d_w2, *biases, *ctx.saved_tensors)
    optional = [x if x.numel() else None for x in (b1, b2, scale, shift)]
    return (*grads, *optional, None)


serial_mlp.register_autograd(_differentiate, setup_context=_setup_context)


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    """The kernels read contiguous tensors. A saved-tensor hook may return any strides."""
    return [None if x is None else x.contiguous() for x in tensors]


def _copy(x: Tensor) -> Tensor:
    """A contiguous copy, which a kernel overwrites."""
    return x.clone(memory_format=torch.contiguous_format)


def _transposed(x: Tensor) -> Tensor:
    """A contiguous copy with the last two dimensions exchanged."""
    return _copy(x.transpose(-1, -2))
