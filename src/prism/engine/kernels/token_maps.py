"""The linear maps of a layer for one token per row, each with what surrounds it, in one kernel.

    maps     y = [W₀ n, W₁ n, …] + residual,  n = x or RMSNorm(x);  W₀'s outputs through a short convolution and SiLU, if asked
    gated    y = SiLU(W₀ n) ⊙ W₁ n

A step of a few rows reads every weight once and computes little, so a kernel's time is that of its weights, plus its start.
Programs hold BM rows and BN outputs of one map. They sum the squares of x while they read it: the norm is a factor of the
result. Maps with the same input share a launch, and no weight is copied. The conv state moves on by one token, in place if
`after` is `before`.

The *anchor* is a convolution of n itself. It belongs to the same launch: one further program for each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.short_conv import joined

PROGRAMS = 132
"""Programs that a launch should have at least: multiprocessors of an H100 or H200."""
MOST_MAPS = 4


@triton.jit
def products(
    x,
    norm,
    weight,
    other,
    m,
    n,
    rows,
    outputs,
    eps,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`[BM, BN]` of W n, and of a second map of the same size (the same again if `other` is None)."""
    first, second = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        rows_known, outputs_known = (m < rows)[:, None], (n < outputs)[None, :]
        if D % BD != 0:
            rows_known, outputs_known = rows_known & (d < D)[None, :], outputs_known & (d < D)[:, None]
        part = tl.load(x + m[:, None] * D + d[None, :], mask=rows_known, other=0.0)
        place = n[None, :] * D + d[:, None]
        columns = tl.load(weight + place, mask=outputs_known, other=0.0)
        if norm is not None:
            exact = part.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            factor = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
            part = (exact * factor[None, :]).to(part.dtype)
        first = tl.dot(part, columns, first, input_precision=PRECISION)
        if other is not None:
            columns = tl.load(other + place, mask=outputs_known, other=0.0)
            second = tl.dot(part, columns, second, input_precision=PRECISION)
    if norm is not None:
        scale = tl.rsqrt(squares / D + eps)[:, None]
        first, second = first * scale, second * scale
    return first, second


@triton.jit
def convolved(now, taps, before, after, m, c, rows, N: tl.constexpr, W: tl.constexpr):
    """SiLU of the convolution's current output `[rows, channels]` in float32. Writes the conv state `after` `[rows, W - 1, N]`,
    the last W - 1 tokens. `now` is rounded to what a conv state holds."""
    if W == 1:
        return now * tl.sigmoid(now)
    else:  # Triton also compiles code after a return
        inside = (m < rows)[:, None] & (c < N)[None, :]
        place = m[:, None] * ((W - 1) * N) + c[None, :]
        known = c < N
        now = now.to(before.dtype.element_ty)
        z = now.to(tl.float32) * tl.load(taps + (W - 1) * N + c, mask=known, other=0.0).to(tl.float32)[None, :]
        seen = ()
        for i in tl.static_range(W - 1):
            past = tl.load(before + place + i * N, mask=inside, other=0.0)
            z += past.to(tl.float32) * tl.load(taps + i * N + c, mask=known, other=0.0).to(tl.float32)[None, :]
            seen = joined(seen, (past,))
        seen = joined(seen, (now,))
        tl.debug_barrier()  # `after` may be `before`: all threads have read
        for i in tl.static_range(W - 1):
            tl.store(after + place + i * N, seen[i + 1], mask=inside)
        return z * tl.sigmoid(z)


@triton.jit
def anchor_row(
    x, norm, taps, before, after, u, b, rows, eps, D: tl.constexpr, W: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """u of one row: the convolution of RMSNorm(x)."""
    m, c = b + tl.arange(0, 1), tl.arange(0, BC)
    place = m[:, None] * D + c[None, :]
    exact = tl.load(x + place, mask=(c < D)[None, :], other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / D + eps)[:, None]
    factor = tl.load(norm + c, mask=c < D, other=0.0).to(tl.float32)
    now = (exact * scale * factor[None, :]).to(u.dtype.element_ty).to(tl.float32)
    y = convolved(now, taps, before, after, m, c, rows, D, W)
    tl.store(u + place, y.to(u.dtype.element_ty), mask=(c < D)[None, :])


@triton.jit(do_not_specialize=["rows"])
def maps_kernel(
    x,
    norm,
    weight_0,
    weight_1,
    weight_2,
    weight_3,
    residual,
    y,
    taps,
    before,
    after,
    anchor_taps,
    anchor_before,
    anchor_after,
    u,
    rows,
    eps,
    D: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    W: tl.constexpr,
    ANCHOR_W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x `[rows, D]`, weights `[N, D]`, y `[rows, N0 + N1 + N2 + N3]`, residual like y; W 0: no convolution."""
    T0: tl.constexpr = (N0 + BN - 1) // BN
    T1: tl.constexpr = T0 + (N1 + BN - 1) // BN
    T2: tl.constexpr = T1 + (N2 + BN - 1) // BN
    T3: tl.constexpr = T2 + (N3 + BN - 1) // BN
    pid = tl.program_id(0)
    products_count = T3 * tl.cdiv(rows, BM)
    if pid < products_count:
        tile, m = pid % T3, pid // T3 * BM + tl.arange(0, BM)
        weight, outputs, start, begins = weight_0, tl.where(tile < T0, N0, N1), 0, 0
        if weight_1 is not None:
            weight = tl.where(tile < T0, weight, weight_1)
            start, begins = tl.where(tile < T0, 0, N0), tl.where(tile < T0, 0, T0)
        if weight_2 is not None:
            weight, outputs = tl.where(tile < T1, weight, weight_2), tl.where(tile < T1, outputs, N2)
            start, begins = tl.where(tile < T1, start, N0 + N1), tl.where(tile < T1, begins, T1)
        if weight_3 is not None:
            weight, outputs = tl.where(tile < T2, weight, weight_3), tl.where(tile < T2, outputs, N3)
            start, begins = tl.where(tile < T2, start, N0 + N1 + N2), tl.where(tile < T2, begins, T2)
        n = (tile - begins) * BN + tl.arange(0, BN)
        result, _ = products(x, norm, weight, None, m, n, rows, outputs, eps, D, BM, BN, BD, PRECISION)
        if W > 0:  # noqa: SIM102  (known when compiling, the other is not)
            if tile < T0:
                result = convolved(result, taps, before, after, m, n, rows, N0, W)
        inside = (m < rows)[:, None] & (n < outputs)[None, :]
        place = m[:, None] * (N0 + N1 + N2 + N3) + start + n[None, :]
        if residual is not None:
            result += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
    else:
        if u is not None:
            b = pid - products_count
            anchor_row(x, norm, anchor_taps, anchor_before, anchor_after, u, b, rows, eps, D, ANCHOR_W, BC)


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    x,
    norm,
    gate,
    up,
    y,
    rows,
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x `[rows, D]`, weights `[N, D]`, y `[rows, N]`."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    m = tl.program_id(0) // TILES * BM + tl.arange(0, BM)
    n = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    g, v = products(x, norm, gate, up, m, n, rows, N, eps, D, BM, BN, BD, PRECISION)
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], (g * tl.sigmoid(g) * v).to(y.dtype.element_ty), mask=inside)


class Window(NamedTuple):
    """A short convolution of one token: its taps, and the conv state before and after it."""

    taps: Tensor | None  # [W, N]; None: W = 1, only SiLU
    before: Tensor | None  # [rows, W - 1, N]
    after: Tensor | None  # the same; may be `before`

    @property
    def size(self) -> int:
        return 1 if self.taps is None else self.taps.shape[0]


def maps(
    x: Tensor,
    weights: list[Tensor],
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    window: Window | None = None,
    anchor: Window | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Up to four linear maps of x `[rows, D]`, or of its norm: `[rows, ΣN]`, and u `[rows, D]` if there is an anchor.

    All tensors are contiguous, weights in x's dtype. `window` is the first map's convolution.
    """
    (rows, D), sizes = x.shape, [w.shape[0] for w in weights]
    y, u = x.new_empty(rows, sum(sizes)), None if anchor is None else torch.empty_like(x)
    missing = [None] * (MOST_MAPS - len(weights))
    tile = _tile(x, sizes)
    weight, eps = (None, 0.0) if norm is None else norm
    of_first, of_anchor = window or Window(None, None, None), anchor or Window(None, None, None)
    count = sum(-(-size // tile["BN"]) for size in sizes) * -(-rows // tile["BM"])
    with device_guard(x):
        maps_kernel[(count + (0 if anchor is None else rows),)](
            x, weight, *weights, *missing, residual, y, *of_first, *of_anchor, u, rows, eps, D=D,
            **{f"N{i}": size for i, size in enumerate([*sizes, *[0] * len(missing)])},
            W=0 if window is None else window.size, ANCHOR_W=of_anchor.size,
            BC=tile_width(D), **tile,
        )  # fmt: skip
    return y, u


def gated(x: Tensor, gate: Tensor, up: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """SiLU(gate n) ⊙ up n `[rows, N]` for n = RMSNorm(x), x `[rows, D]`."""
    (rows, D), N = x.shape, gate.shape[0]
    y, tile = x.new_empty(rows, N), _tile(x, [N])
    with device_guard(x):
        gated_kernel[(-(-N // tile["BN"]) * -(-rows // tile["BM"]),)](
            x, norm[0], gate, up, y, rows, norm[1], D=D, N=N, **tile
        )
    return y


def _tile(x: Tensor, sizes: list[int]) -> dict[str, Any]:
    """Rows and outputs of a program, and inputs per step: the most outputs with which all multiprocessors are busy."""
    rows, D = x.shape
    half = x.dtype != torch.float32
    BM = min(64, tile_width(rows))
    blocks = -(-rows // BM)
    wide = [BN for BN in (64, 32) if sum(-(-size // BN) for size in sizes) * blocks >= PROGRAMS]
    BN = wide[0] if wide else 16
    most = (256 if BM * BN <= 1024 else 128) if half else 64
    tile = {"BM": BM, "BN": BN, "BD": min(most, tile_width(D)), "PRECISION": "tf32" if half else "ieee"}
    return {**tile, "num_warps": 4, "num_stages": 4}
