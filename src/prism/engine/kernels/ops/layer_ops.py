"""Kernels of a layer's pieces around its mixer: residual connection and norm, SwiGLU's product, gated norm; with gradients.

    residual norm   s = x + delta,   y = unit(s) ⊙ weight          unit(s) = s / sqrt(mean s² + eps)
    product         h = silu(g) ⊙ u                                 g and u side by side, `[M, 2F]`
    gated norm      y = unit(o) ⊙ weight ⊙ silu(g), or ⊙ σ(g)

In torch, under autocast, the sum, the norm in float32 and the cast to half precision are three passes, and their gradients
six. Here both ways are one: only s is saved, whose gradient is added inside the kernel. The other two backward kernels also
return h and y themselves. So they are not kept for the linear map that follows: its weights' gradient takes them from there.
A norm's weight gets its gradient as a sum per program; torch adds these in a fixed order. The definitions in torch, and those
maps, are in `engine/layer_ops.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard
from prism.engine.kernels.ops.sigmoid import sigmoid

ELEMENTS = 2048
"""Numbers per tile of a norm."""
PROGRAMS = 4224
"""Programs of a norm's backward at most: 32 per multiprocessor of an H200."""
WARPS = 4
"""Warps per program of a norm."""
BLOCK = 1024
"""Channels per program of the product."""


@triton.jit(do_not_specialize=["rows"])
def residual_norm_kernel(
    x,
    delta,
    weight,
    s,
    y,
    eps,
    rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x, delta (None: 0) `[rows, D]` → s (None: not stored) and y (None: no norm) `[rows, D]`."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < D)[None, :]
    place = r[:, None] * D + c[None, :]
    z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        z += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
    if s is not None:
        z = z.to(s.dtype.element_ty)
        tl.store(s + place, z, mask=inside)
        z = z.to(tl.float32)
    if y is not None:
        shrink = tl.rsqrt(tl.sum(z * z, 1) / D + eps)
        factor = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)
        tl.store(y + place, (z * shrink[:, None] * factor[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "repeat"])
def residual_norm_backward_kernel(
    s,
    weight,
    d_s,
    d_y,
    d_x,
    d_delta,
    d_weight,
    eps,
    rows,
    repeat,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient of x, once more in delta's dtype, and of the weight over repeat · ROWS rows, `[programs, D]`."""
    c = tl.arange(0, BLOCK)
    factor = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * repeat * ROWS
    for i in range(repeat):
        r = first + i * ROWS + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (c < D)[None, :]
        place = r[:, None] * D + c[None, :]
        z = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
        d_out = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
        shrink = tl.rsqrt(tl.sum(z * z, 1) / D + eps)[:, None]
        unit = z * shrink
        total += tl.sum(d_out * unit, 0)
        d_unit = d_out * factor[None, :]
        d_z = shrink * (d_unit - unit * (tl.sum(d_unit * unit, 1) / D)[:, None])
        if d_s is not None:
            d_z += tl.load(d_s + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + place, d_z.to(d_x.dtype.element_ty), mask=inside)
        if d_delta is not None:
            tl.store(d_delta + place, d_z.to(d_delta.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * D + c, total, mask=c < D)


@triton.jit
def gate_and_slope(g, BY_SIGMOID: tl.constexpr):
    """σ(g) or silu(g), and its derivative."""
    s = sigmoid(g)
    if BY_SIGMOID:
        activated = s
        slope = s * (1.0 - s)
    else:
        activated = g * s
        slope = s * (1.0 + g * (1.0 - s))
    return activated, slope


@triton.jit
def product_kernel(gu, h, F, BLOCK: tl.constexpr):
    """One program per row and BLOCK channels: gu `[M, 2F]` → h `[M, F]`."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gu + row * 2 * F + c, mask=c < F, other=0.0).to(tl.float32)
    u = tl.load(gu + row * 2 * F + F + c, mask=c < F, other=0.0).to(tl.float32)
    tl.store(h + row * F + c, (g * sigmoid(g) * u).to(h.dtype.element_ty), mask=c < F)


@triton.jit
def product_backward_kernel(gu, d_h, d_gu, h, F, BLOCK: tl.constexpr):
    """The gradient of gu `[M, 2F]`, and h `[M, F]` again."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gu + row * 2 * F + c, mask=c < F, other=0.0).to(tl.float32)
    u = tl.load(gu + row * 2 * F + F + c, mask=c < F, other=0.0).to(tl.float32)
    d_out = tl.load(d_h + row * F + c, mask=c < F, other=0.0).to(tl.float32)
    activated, slope = gate_and_slope(g, False)
    tl.store(h + row * F + c, (activated * u).to(h.dtype.element_ty), mask=c < F)
    tl.store(d_gu + row * 2 * F + c, (d_out * u * slope).to(d_gu.dtype.element_ty), mask=c < F)
    tl.store(d_gu + row * 2 * F + F + c, (d_out * activated).to(d_gu.dtype.element_ty), mask=c < F)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(
    o,
    g,
    weight,
    y,
    eps,
    rows,
    BY_SIGMOID: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """o, g `[rows, D]`, weight `[D]` (None: 1) → y `[rows, D]`."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (v < D)[None, :]
    place = r[:, None] * D + v[None, :]
    x = tl.load(o + place, mask=inside, other=0.0).to(tl.float32)
    gate, _ = gate_and_slope(tl.load(g + place, mask=inside, other=0.0).to(tl.float32), BY_SIGMOID)
    z = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if weight is not None:
        z *= tl.load(weight + v, mask=v < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, (z * gate).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "repeat"])
def gated_norm_backward_kernel(
    o,
    g,
    weight,
    d_y,
    d_o,
    d_g,
    y,
    d_weight,
    eps,
    rows,
    repeat,
    BY_SIGMOID: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradients of o and g, y again, and the weight's gradient over repeat · ROWS rows, `[programs, D]`."""
    v = tl.arange(0, BLOCK)
    factor = tl.full((BLOCK,), 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + v, mask=v < D, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)  # summed over rows at the end: warps need not wait for each other
    first = tl.program_id(0).to(tl.int64) * repeat * ROWS
    for i in range(repeat):
        r = first + i * ROWS + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (v < D)[None, :]
        place = r[:, None] * D + v[None, :]
        x = tl.load(o + place, mask=inside, other=0.0).to(tl.float32)
        activated, slope = gate_and_slope(tl.load(g + place, mask=inside, other=0.0).to(tl.float32), BY_SIGMOID)
        d_out = tl.load(d_y + place, mask=inside, other=0.0).to(tl.float32)
        shrink = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        unit = x * shrink
        scaled = unit * factor[None, :]
        total += d_out * activated * unit
        d_unit = d_out * activated * factor[None, :]
        d_x = shrink * (d_unit - unit * (tl.sum(d_unit * unit, 1) / D)[:, None])
        tl.store(d_o + place, d_x.to(d_o.dtype.element_ty), mask=inside)
        tl.store(d_g + place, (d_out * scaled * slope).to(d_g.dtype.element_ty), mask=inside)
        tl.store(y + place, (scaled * activated).to(y.dtype.element_ty), mask=inside)
    tl.store(d_weight + tl.program_id(0) * D + v, tl.sum(total, 0), mask=v < D)


def residual_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x, delta `[M, D]` → s in x's dtype (x itself without delta) and y in `dtype`. No gradient."""
    s, y = x if delta is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    tile = _tile(x)
    with device_guard(x):
        residual_norm_kernel[(-(-len(x) // tile["ROWS"]),)](
            x, delta, weight, None if delta is None else s, y, eps, len(x), **tile, num_warps=WARPS
        )
    return s, y


def residual_sum(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta `[M, D]` in x's dtype. No gradient."""
    s, tile = torch.empty_like(x), _tile(x)
    with device_guard(x):
        residual_norm_kernel[(-(-len(x) // tile["ROWS"]),)](
            x, delta, None, s, None, 0.0, len(x), **tile, num_warps=WARPS
        )
    return s


def residual_norm_backward(
    s: Tensor, weight: Tensor, d_s: Tensor | None, d_y: Tensor, eps: float, delta: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of x, of delta if its dtype is given, and of the weight."""
    d_x = torch.empty_like(s)
    d_delta = d_x if delta == s.dtype else None if delta is None else torch.empty_like(s, dtype=delta)
    tile = _tile(s)
    tiles = -(-len(s) // tile["ROWS"])
    programs = min(tiles, PROGRAMS)
    shares = s.new_empty(programs, s.shape[1], dtype=torch.float32)
    with device_guard(s):
        residual_norm_backward_kernel[(programs,)](
            s, weight, d_s, d_y, d_x, None if d_delta is d_x else d_delta, shares, eps, len(s), -(-tiles // programs),
            **tile, num_warps=WARPS,
        )  # fmt: skip
    return d_x, d_delta, shares.sum(0).to(weight.dtype)


def product(gu: Tensor) -> Tensor:
    """`[M, 2F]` → `[M, F]`. No gradient."""
    rows, F = gu.shape[0], gu.shape[1] // 2
    h = gu.new_empty(rows, F)
    with device_guard(gu):
        product_kernel[(rows, -(-F // BLOCK))](gu, h, F, BLOCK=BLOCK, num_warps=4)
    return h


def product_backward(gu: Tensor, d_h: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gu, and h."""
    rows, F = gu.shape[0], gu.shape[1] // 2
    d_gu, h = torch.empty_like(gu), gu.new_empty(rows, F)
    with device_guard(gu):
        product_backward_kernel[(rows, -(-F // BLOCK))](gu, d_h, d_gu, h, F, BLOCK=BLOCK, num_warps=4)
    return d_gu, h


def gated_norm(o: Tensor, g: Tensor, weight: Tensor | None, eps: float, by_sigmoid: bool = False) -> Tensor:
    """o, g `[rows, D]` → `[rows, D]`. No gradient."""
    y, tile = torch.empty_like(o), _tile(o)
    with device_guard(o):
        gated_norm_kernel[(-(-len(o) // tile["ROWS"]),)](
            o, g, weight, y, eps, len(o), by_sigmoid, **tile, num_warps=WARPS
        )
    return y


def gated_norm_backward(
    o: Tensor, g: Tensor, weight: Tensor | None, d_y: Tensor, eps: float, by_sigmoid: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of o and g, y, and the gradient of the weight."""
    d_o, d_g, y, tile = torch.empty_like(o), torch.empty_like(g), torch.empty_like(o), _tile(o)
    tiles = -(-len(o) // tile["ROWS"])
    programs = min(tiles, PROGRAMS)
    shares = o.new_empty(programs, o.shape[1], dtype=torch.float32)
    with device_guard(o):
        gated_norm_backward_kernel[(programs,)](
            o,
            g,
            weight,
            d_y,
            d_o,
            d_g,
            y,
            shares,
            eps,
            len(o),
            -(-tiles // programs),
            by_sigmoid,
            **tile,
            num_warps=WARPS,
        )
    return d_o, d_g, y, None if weight is None else shares.sum(0).to(weight.dtype)


def _tile(x: Tensor) -> dict[str, int]:
    block = 1 << (x.shape[1] - 1).bit_length()
    return {"D": x.shape[1], "BLOCK": block, "ROWS": max(1, ELEMENTS // block)}
