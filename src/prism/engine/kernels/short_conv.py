"""Short causal depthwise convolution with its SiLU, in one pass: y_t = silu(c + Σ_i weight[W-1-i] x_{t-i}).

Taps that reach before x read `window`, the conv state, if there is one; taps that reach into an earlier document read zeros.
The backward computes the sum before the SiLU again, writes its gradient dz and each program's part of the weights' gradient,
and computes dx from dz in a second pass. The parts are summed by torch, in a fixed order. The definition in torch is
`short_conv` in `engine/fused.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.runtime import Operator, all_contiguous_aligned, gradient_like, present, schema_of

# One warp holds whole rows of a tile, so that sums over tokens stay within a thread.
TILE: dict[str, int] = {"ROWS": 4, "COLUMNS": 256, "num_warps": 1}
# The weights' gradient: a program sums over SUM_REPEAT tiles, one after the other.
SUM_TILE, SUM_REPEAT = {**TILE, "ROWS": 2}, 64


@triton.jit
def tap(
    x,
    window,
    documents,
    b,
    t,
    c,
    back: tl.constexpr,
    T,
    D,
    W: tl.constexpr,
):
    """x_{t-back} `[ROWS, COLUMNS]` in float32, zero in another document and outside the sequence."""
    there = t - back
    inside = (t < T) & (there >= 0)
    if documents is not None:
        own = documents + b * T
        # A document that began before this span has number 0, and so have the tokens of the window.
        now = tl.load(own + t, mask=t < T, other=0)
        inside = inside & (tl.load(own + there, mask=inside, other=-1) == now)
    seen = tl.load(x + (b * T + there)[:, None] * D + c[None, :], mask=inside[:, None] & (c < D)[None, :], other=0.0)
    seen = seen.to(tl.float32)
    if window is not None:
        before = (t < T) & (there < 0)
        if documents is not None:
            before = before & (now == 0)
        place = window + (b * (W - 1) + W - 1 + there)[:, None] * D + c[None, :]
        seen += tl.load(place, mask=before[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
    return seen


@triton.jit
def joined(some, more):
    """Two tuples as one: Triton adds tuples, but does not unpack them."""
    return some + more


@triton.jit
def taps(x, window, documents, b, t, c, T, D, W: tl.constexpr):
    """x_t, x_{t-1} … as a tuple."""
    seen = ()
    for back in tl.static_range(W):
        seen = joined(seen, (tap(x, window, documents, b, t, c, back, T, D, W),))
    return seen


@triton.jit
def before_silu(seen, weight, bias, c, D, W: tl.constexpr):
    """The weighted sum of the taps, with the bias."""
    z = tl.zeros_like(seen[0])
    for back in tl.static_range(W):
        factor = tl.load(weight + (W - 1 - back) * D + c, mask=c < D, other=0.0).to(tl.float32)
        z += factor[None, :] * seen[back]
    if bias is not None:
        z += tl.load(bias + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    return z


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per ROWS tokens of COLUMNS channels. x, y `[B, T, D]`, weight `[W, D]`, window `[B, W - 1, D]`, documents
    `[B, T]`."""
    parts = tl.cdiv(T, ROWS)
    b = (tl.program_id(0) // parts).to(tl.int64)
    t = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = before_silu(taps(x, window, documents, b, t, c, T, D, W), weight, bias, c, D, W)
    if SILU:
        z *= tl.sigmoid(z)
    place = (b * T + t)[:, None] * D + c[None, :]
    tl.store(y + place, z.to(y.dtype.element_ty), mask=(t < T)[:, None] & (c < D)[None, :])


@triton.jit
def zeros_each(count: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of `count` zero vectors `[COLUMNS]`."""
    zeros = ()
    for _ in tl.static_range(count):
        zeros = joined(zeros, (tl.zeros((COLUMNS,), tl.float32),))
    return zeros


@triton.jit
def add_each(sums, dz, seen, W: tl.constexpr):
    """`sums` plus Σ_t dz_t x_{t-back} for every tap, and Σ_t dz_t for the bias."""
    more = ()
    for back in tl.static_range(W):
        more = joined(more, (sums[back] + tl.sum(dz * seen[back], 0),))
    return joined(more, (sums[W] + tl.sum(dz, 0),))


@triton.jit(do_not_specialize=["T"])
def short_conv_weights_kernel(
    x,
    weight,
    bias,
    window,
    documents,
    d_y,
    d_z,
    d_weight,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REPEAT: tl.constexpr,
):
    """d_z `[B, T, D]`, and the gradients of weights and bias summed over REPEAT · ROWS tokens, `[parts, W + 1, D]`."""
    parts = tl.cdiv(T, ROWS * REPEAT)
    b = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * (ROWS * REPEAT)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = zeros_each(W + 1, COLUMNS)
    for r in range(REPEAT):
        t = first + r * ROWS + tl.arange(0, ROWS)
        place = (b * T + t)[:, None] * D + c[None, :]
        inside = (t < T)[:, None] & (c < D)[None, :]
        dz = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
        seen = taps(x, window, documents, b, t, c, T, D, W)
        if SILU:
            z = before_silu(seen, weight, bias, c, D, W)
            s = tl.sigmoid(z)
            dz *= s * (1.0 + z * (1.0 - s))
        tl.store(d_z + place, dz.to(d_z.dtype.element_ty), mask=inside)
        sums = add_each(sums, dz, seen, W)
    share = d_weight + tl.program_id(0).to(tl.int64) * (W + 1) * D + c
    for back in tl.static_range(W):
        tl.store(share + (W - 1 - back) * D, sums[back], mask=c < D)
    tl.store(share + W * D, sums[W], mask=c < D)


@triton.jit(do_not_specialize=["T"])
def short_conv_inputs_kernel(
    d_z,
    weight,
    documents,
    d_x,
    T,
    D,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx_t = Σ_i weight[W-1-i] dz_{t+i}, within one document."""
    parts = tl.cdiv(T, ROWS)
    b = (tl.program_id(0) // parts).to(tl.int64)
    t = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dx = tl.zeros((ROWS, COLUMNS), tl.float32)
    for ahead in tl.static_range(W):
        inside = t + ahead < T
        if documents is not None:
            own = documents + b * T
            now = tl.load(own + t, mask=t < T, other=-1)
            inside = inside & (tl.load(own + t + ahead, mask=inside, other=-2) == now)
        place = (b * T + t + ahead)[:, None] * D + c[None, :]
        dz = tl.load(d_z + place, mask=inside[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
        dx += tl.load(weight + (W - 1 - ahead) * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :] * dz
    place = (b * T + t)[:, None] * D + c[None, :]
    tl.store(d_x + place, dx.to(d_x.dtype.element_ty), mask=(t < T)[:, None] & (c < D)[None, :])


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
        short_conv_kernel[_grid(x)](*given, y, *x.shape[1:], W=given.weight.shape[0], SILU=silu, **TILE)
    return y


def _short_conv_shapes(*inputs: Any) -> Tensor:
    return inputs[0].new_empty(inputs[0].shape)


def _short_conv_backward(d_y: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    d_y, *tensors = all_contiguous_aligned(d_y, *inputs[:INPUT_COUNT])
    given, silu = ConvInputs(*tensors), inputs[INPUT_COUNT]
    x, weight, bias = given[:3]
    (B, T, D), W = x.shape, weight.shape[0]
    programs = B * -(-T // (SUM_TILE["ROWS"] * SUM_REPEAT))
    d_z, d_x = torch.empty_like(x), torch.empty_like(x)
    shares = x.new_empty(programs, W + 1, D, dtype=torch.float32)
    with device_guard(x):
        short_conv_weights_kernel[(programs, -(-D // SUM_TILE["COLUMNS"]))](
            *given, d_y, d_z, shares, T, D, W=W, SILU=silu, **SUM_TILE, REPEAT=SUM_REPEAT
        )
        short_conv_inputs_kernel[_grid(x)](d_z, weight, given.documents, d_x, T, D, W=W, **TILE)
    d_bias = None if bias is None else shares[:, W].sum(0).to(bias.dtype)
    return d_x, shares[:, :W].sum(0).to(weight.dtype), present(d_bias, weight)


def _short_conv_backward_shapes(d_y: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = inputs[:3]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), gradient_like(bias, weight)


def _grid(x: Tensor) -> tuple[int, int]:
    B, T, D = x.shape
    return B * -(-T // TILE["ROWS"]), -(-D // TILE["COLUMNS"])


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
