"""Short causal depthwise convolution with its SiLU, in one pass: y_t = silu(c + Σ_i weight[W-1-i] x_{t-i}).

Taps that reach before x read `window`, the conv state, if there is one; taps that reach into an earlier document read zeros.
The backward computes the sum before the SiLU again, and from it dx and each program's part of the weights' gradient, in one
pass. The parts are summed by torch, in a fixed order. The definition in torch is `short_conv` in `engine/layer_ops.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.ops.sigmoid import sigmoid
from prism.engine.kernels.runtime import Operator, all_contiguous_aligned, gradient_like, present, schema_of

# One warp walks along STRIP tokens and loads UNROLL of them at a time.
TILE: dict[str, int] = {"COLUMNS": 128, "STRIP": 32, "UNROLL": 4, "num_warps": 1}
BACKWARD_TILE: dict[str, int] = {"COLUMNS": 128, "STRIP": 64, "UNROLL": 4, "num_warps": 1}


@triton.jit
def joined(some, more):
    """Two tuples as one: Triton adds tuples, but does not unpack them."""
    return some + more


@triton.jit
def repeated(value, count: tl.constexpr):
    """A tuple of `count` times the same value."""
    same = ()
    for _ in tl.static_range(count):
        same = joined(same, (value,))
    return same


@triton.jit
def pushed(new, values, count: tl.constexpr):
    """`values` with `new` in front and the last of its `count` dropped."""
    kept = (new,)
    for i in tl.static_range(count - 1):
        kept = joined(kept, (values[i],))
    return kept


@triton.jit
def weights_of(weight, c, D, W: tl.constexpr):
    """The factors of x_t, x_{t-1} …, each `[COLUMNS]`."""
    factors = ()
    for back in tl.static_range(W):
        factors = joined(factors, (tl.load(weight + (W - 1 - back) * D + c, mask=c < D, other=0.0).to(tl.float32),))
    return factors


@triton.jit
def row(x, b, t, c, T, D):
    """x_t `[COLUMNS]` in float32, zero outside the sequence."""
    width = tl.where((t >= 0) & (t < T), D, 0)
    return tl.load(x + (b * T + t) * D + c, mask=c < width, other=0.0).to(tl.float32)


@triton.jit
def document(documents, b, t, T):
    """The number of t's document: 0 before the sequence, -1 after it."""
    return tl.load(documents + b * T + t, mask=(t >= 0) & (t < T), other=tl.where(t < 0, 0, -1))


@triton.jit
def rows_before(x, window, b, first, c, T, D, W: tl.constexpr):
    """x_{first-1}, x_{first-2} … as a tuple of W - 1 rows; before the sequence, those of the window."""
    seen = ()
    for back in tl.static_range(1, W):
        there = first - back
        value = row(x, b, there, c, T, D)
        if window is not None:
            place = window + (b * (W - 1) + W - 1 + there) * D + c
            value += tl.load(place, mask=c < tl.where(there < 0, D, 0), other=0.0).to(tl.float32)
        seen = joined(seen, (value,))
    return seen


@triton.jit
def documents_before(documents, b, first, T, W: tl.constexpr):
    """The documents of the W - 1 tokens before `first`; 0 for all where there are no documents."""
    numbers = ()
    for back in tl.static_range(1, W):
        number = 0
        if documents is not None:
            number = document(documents, b, first - back, T)
        numbers = joined(numbers, (number,))
    return numbers


@triton.jit
def convolved(value, now, before, numbers, factors, added, W: tl.constexpr):
    """The sum before the SiLU at one token of document `now`, from x at that token and at the W - 1 tokens before it."""
    z = added + factors[0] * value
    for back in tl.static_range(1, W):
        z += factors[back] * tl.where(numbers[back - 1] == now, before[back - 1], 0.0)
    return z


@triton.jit
def weight_sums(sums, dz, value, now, before, numbers, W: tl.constexpr):
    """The sums of the weights' gradients with one more token, from dz, the gradient before the SiLU."""
    more = (sums[0] + dz * value,)
    for back in tl.static_range(1, W):
        more = joined(more, (sums[back] + dz * tl.where(numbers[back - 1] == now, before[back - 1], 0.0),))
    return more


@triton.jit
def input_gradient(dz, now, gradients, numbers, factors, W: tl.constexpr):
    """dx of the token W - 1 before this one, which has now met all tokens that saw it; `gradients` are the earlier dz."""
    dx = factors[W - 1] * tl.where(numbers[W - 2] == now, dz, 0.0)
    for ahead in tl.static_range(W - 1):
        dx += factors[ahead] * tl.where(numbers[W - 2] == numbers[W - 2 - ahead], gradients[W - 2 - ahead], 0.0)
    return dx


@triton.jit
def bias_of(bias, c, D, COLUMNS: tl.constexpr):
    """The bias `[COLUMNS]`, zero where there is none."""
    added = tl.zeros((COLUMNS,), tl.float32)
    if bias is not None:
        added = tl.load(bias + c, mask=c < D, other=0.0).to(tl.float32)
    return added


@triton.jit(do_not_specialize=["T"])
def short_conv_kernel(
    x,
    weight,
    bias,
    window,
    documents,
    y,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program per STRIP tokens of COLUMNS channels, token after token. x, y `[B, T, D]`, weight `[W, D]`, window
    `[B, W - 1, D]`, documents `[B, T]`."""
    strips = tl.cdiv(T, STRIP)
    b = (tl.program_id(0) // strips).to(tl.int64)
    first = tl.program_id(0) % strips * STRIP
    end = tl.minimum(first + STRIP, T)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factors = weights_of(weight, c, D, W)
    added = bias_of(bias, c, D, COLUMNS)
    before = rows_before(x, window, b, first, c, T, D, W)
    numbers = documents_before(documents, b, first, T, W)
    for r in range(0, end - first, UNROLL):
        values, places = (), ()
        for u in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            values = joined(values, (row(x, b, first + r + u, c, T, D),))
            if documents is not None:
                places = joined(places, (document(documents, b, first + r + u, T),))
        for u in tl.static_range(UNROLL):
            t = first + r + u
            now = 0
            if documents is not None:
                now = places[u]
            z = convolved(values[u], now, before, numbers, factors, added, W)
            if SILU:
                z *= sigmoid(z)
            tl.store(y + (b * T + t) * D + c, z.to(y.dtype.element_ty), mask=c < tl.where(t < end, D, 0))
            before = pushed(values[u], before, W - 1)
            numbers = pushed(now, numbers, W - 1)


@triton.jit(do_not_specialize=["T"])
def short_conv_backward_kernel(
    x,
    weight,
    bias,
    window,
    documents,
    d_y,
    d_x,
    d_weight,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program per STRIP tokens of COLUMNS channels, token after token: d_x `[B, T, D]`, and the gradients of weights and
    bias summed over the strip, `[strips, W + 1, D]`. The last W - 1 rows of x, dz and documents stay in registers, so that
    x and d_y are read once. dx of the strip's last tokens needs dz of the W - 1 tokens after it, which are computed again."""
    strips = tl.cdiv(T, STRIP)
    b = (tl.program_id(0) // strips).to(tl.int64)
    first = tl.program_id(0) % strips * STRIP
    end = tl.minimum(first + STRIP, T)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factors = weights_of(weight, c, D, W)
    added = bias_of(bias, c, D, COLUMNS)
    before = rows_before(x, window, b, first, c, T, D, W)
    numbers = documents_before(documents, b, first, T, W)
    gradients = repeated(tl.zeros((COLUMNS,), tl.float32), W - 1)
    sums = repeated(tl.zeros((COLUMNS,), tl.float32), W + 1)
    for r in range(0, end - first + W - 1, UNROLL):
        start = first + r
        values, answers, places = (), (), ()
        for u in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            values = joined(values, (row(x, b, start + u, c, T, D),))
            answers = joined(answers, (row(d_y, b, start + u, c, T, D),))
            if documents is not None:
                places = joined(places, (document(documents, b, start + u, T),))
        for u in tl.static_range(UNROLL):
            t = start + u
            now = 0
            if documents is not None:
                now = places[u]
            z = convolved(values[u], now, before, numbers, factors, added, W)
            dz = answers[u]  # type: ignore[var-annotated]  # a tensor
            if SILU:
                s = sigmoid(z)
                dz *= s * (1.0 + z * (1.0 - s))
            own = tl.where(t < end, dz, 0.0)  # later tokens belong to the next strip
            sums = joined(weight_sums(sums, own, values[u], now, before, numbers, W), (sums[W] + own,))
            done = t - (W - 1)
            dx = input_gradient(dz, now, gradients, numbers, factors, W)
            width = tl.where((done >= first) & (done < end), D, 0)
            tl.store(d_x + (b * T + done) * D + c, dx.to(d_x.dtype.element_ty), mask=c < width)
            before = pushed(values[u], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
            gradients = pushed(dz, gradients, W - 1)
    share = d_weight + tl.program_id(0).to(tl.int64) * (W + 1) * D + c
    for back in tl.static_range(W):
        tl.store(share + (W - 1 - back) * D, sums[back], mask=c < D)
    tl.store(share + W * D, sums[W], mask=c < D)


class ConvInputs(NamedTuple):
    """Inputs of the convolution."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [W, D]
    bias: Tensor | None  # [D]
    window: Tensor | None  # the conv state: the tokens before x, [B, W - 1, D]; gets no gradient
    documents: Tensor | None  # [B, T] int32


INPUT_COUNT = len(ConvInputs._fields)


def _short_conv(*inputs: Any) -> Tensor:
    """`ConvInputs` and whether a SiLU follows → y `[B, T, D]`."""
    given, silu = ConvInputs(*all_contiguous_aligned(*inputs[:INPUT_COUNT])), inputs[INPUT_COUNT]
    x, y = given.x, torch.empty_like(given.x)
    with device_guard(x):
        short_conv_kernel[_grid(x, TILE)](*given, y, *x.shape[1:], W=given.weight.shape[0], SILU=silu, **TILE)
    return y


def _short_conv_shapes(*inputs: Any) -> Tensor:
    return inputs[0].new_empty(inputs[0].shape)


def _short_conv_backward(d_y: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    d_y, *tensors = all_contiguous_aligned(d_y, *inputs[:INPUT_COUNT])
    given, silu = ConvInputs(*tensors), inputs[INPUT_COUNT]
    x, weight, bias = given[:3]
    (_, T, D), W = x.shape, weight.shape[0]
    grid, d_x = _grid(x, BACKWARD_TILE), torch.empty_like(x)
    shares = x.new_empty(grid[0], W + 1, D, dtype=torch.float32)
    with device_guard(x):
        short_conv_backward_kernel[grid](*given, d_y, d_x, shares, T, D, W=W, SILU=silu, **BACKWARD_TILE)
    d_bias = None if bias is None else shares[:, W].sum(0).to(bias.dtype)
    return d_x, shares[:, :W].sum(0).to(weight.dtype), present(d_bias, weight)


def _short_conv_backward_shapes(d_y: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = inputs[:3]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), gradient_like(bias, weight)


def _grid(x: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    B, T, D = x.shape
    return B * -(-T // tile["STRIP"]), -(-D // tile["COLUMNS"])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    d_x, d_weight, d_bias = short_conv_backward(d_y, *given, ctx.silu)
    return d_x, d_weight, None if given[2] is None else d_bias, None, None, None


_INPUT_SCHEMA = f"{schema_of(ConvInputs)}, bool silu"

short_conv_backward = Operator(
    "prism::short_conv_backward",
    _short_conv_backward,
    _short_conv_backward_shapes,
    schema=f"(Tensor d_y, {_INPUT_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
short_conv = Operator(
    "prism::short_conv",
    _short_conv,
    _short_conv_shapes,
    _setup_context,
    _differentiate,
    schema=f"({_INPUT_SCHEMA}) -> Tensor",
)
