"""Residual connection and RMSNorm in one pass: s = x + delta, y = s / sqrt(mean s² + eps) ⊙ weight, with gradients.

In torch, under autocast, the sum, the norm in float32 and the cast to half precision are three passes, and their gradients
six. Here both ways are one: only s is saved, whose gradient is added inside the kernel. A program of the backward sums the
weight's gradient over its rows; torch adds these parts in a fixed order. The definition in torch is `residual_norm` in
`engine/pieces.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard

ELEMENTS = 4096
"""Numbers per tile."""
PROGRAMS = 1056
"""Programs of the backward: 8 per multiprocessor of an H200."""
WIDEST = 8192
"""The widest row that a tile holds."""


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
    """x, delta (None: 0) `[rows, D]` → s (None: not stored) and y `[rows, D]`."""
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


def residual_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x, delta `[M, D]` → s in x's dtype (x itself without delta) and y in `dtype`. No gradient."""
    s, y = x if delta is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    tile = _tile(x)
    with device_guard(x):
        residual_norm_kernel[(-(-len(x) // tile["ROWS"]),)](
            x, delta, weight, None if delta is None else s, y, eps, len(x), **tile, num_warps=4
        )
    return s, y


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
            **tile, num_warps=4,
        )  # fmt: skip
    return d_x, d_delta, shares.sum(0).to(weight.dtype)


def _tile(x: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(x.shape[1])
    return {"D": x.shape[1], "BLOCK": block, "ROWS": max(1, ELEMENTS // block)}
