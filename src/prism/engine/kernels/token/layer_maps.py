"""The linear maps of a layer for one token per row, each with what surrounds it, in one kernel.

    normed   n = RMSNorm(x), and PRISM's anchor u, a short convolution of n
    maps     y = [W₀ n, W₁ n, …, W_i u, …] + residual, with W₀'s outputs through a short convolution and SiLU on request
    gated    y = SiLU(W₀ n) ⊙ W₁ n

A step of a few rows reads every weight once and computes little, so a kernel's time is that of its weights, plus its start.
Programs hold BM rows and BN outputs of one map. Maps share a launch, and no weight is copied. A norm has its own kernel, one
program a row: inside the products it would be computed again by every program, which took longer. A convolution moves its
conv state on by one token, in place if `after` is `before`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.ops.short_conv import joined

PROGRAMS = 132
"""Programs that a launch should have at least: multiprocessors of an H100 or H200."""


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


@triton.jit(do_not_specialize=["rows"])
def normed_kernel(
    x,
    norm,
    n,
    taps,
    before,
    after,
    u,
    rows,
    eps,
    D: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
):
    """n = RMSNorm(x) `[rows, D]`, and its convolution u, which may be None. One program per row."""
    m, c = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BC)
    place, known = m[:, None] * D + c[None, :], (c < D)[None, :]
    exact = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
    factor = tl.load(norm + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    now = (exact * tl.rsqrt(tl.sum(exact * exact, 1) / D + eps)[:, None] * factor).to(n.dtype.element_ty)
    tl.store(n + place, now, mask=known)
    if u is not None:
        y = convolved(now.to(tl.float32), taps, before, after, m, c, rows, D, W)
        tl.store(u + place, y.to(u.dtype.element_ty), mask=known)


@triton.jit
def products(
    x,
    weight,
    other,
    m,
    n,
    rows,
    outputs,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`[BM, BN]` of a map of x `[rows, D]`, and of a second map of the same size (zeros if `other` is None)."""
    first, second = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        rows_known, outputs_known = (m < rows)[:, None], (n < outputs)[None, :]
        if D % BD != 0:
            rows_known, outputs_known = rows_known & (d < D)[None, :], outputs_known & (d < D)[:, None]
        part = tl.load(x + m[:, None] * D + d[None, :], mask=rows_known, other=0.0)
        place = n[None, :] * D + d[:, None]
        columns = tl.load(weight + place, mask=outputs_known, other=0.0)
        first = tl.dot(part, columns, first, input_precision=PRECISION)
        if other is not None:
            columns = tl.load(other + place, mask=outputs_known, other=0.0)
            second = tl.dot(part, columns, second, input_precision=PRECISION)
    return first, second


@triton.jit(do_not_specialize=["rows"])
def maps_kernel(
    x,
    u,
    weights,
    residual,
    y,
    taps,
    before,
    after,
    rows,
    SIZES: tl.constexpr,
    OF_X: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x and u `[rows, D]`; weights `[N, D]` of SIZES outputs, of which the first OF_X read x and the others u; y and residual
    `[rows, WIDTH]`. W 0: no convolution of the first map's outputs. TILES: programs for the same rows."""
    tile, m = tl.program_id(0) % TILES, tl.program_id(0) // TILES * BM + tl.arange(0, BM)
    weight, outputs, given = weights[0], SIZES[0], x
    start, begins = 0, 0  # of the tile's map: its first output in y, and its first tile
    passed, placed = (SIZES[0] + BN - 1) // BN, SIZES[0]
    for i in tl.static_range(1, len(SIZES)):
        here = tile >= passed
        weight, outputs = tl.where(here, weights[i], weight), tl.where(here, SIZES[i], outputs)
        start, begins = tl.where(here, placed, start), tl.where(here, passed, begins)
        if i >= OF_X:
            given = tl.where(here, u, given)
        passed += (SIZES[i] + BN - 1) // BN
        placed += SIZES[i]
    n = (tile - begins) * BN + tl.arange(0, BN)
    result, _ = products(given, weight, None, m, n, rows, outputs, D, BM, BN, BD, PRECISION)
    if W > 0:  # noqa: SIM102  (known when compiling, the other is not)
        if tile < (SIZES[0] + BN - 1) // BN:
            result = convolved(result, taps, before, after, m, n, rows, SIZES[0], W)
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    place = m[:, None] * WIDTH + start + n[None, :]
    if residual is not None:
        result += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    x,
    gate,
    up,
    y,
    rows,
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
    g, v = products(x, gate, up, m, n, rows, N, D, BM, BN, BD, PRECISION)
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], (g * tl.sigmoid(g) * v).to(y.dtype.element_ty), mask=inside)


class Window(NamedTuple):
    """A short convolution of one token: its taps, and the conv state before and after it."""

    taps: Tensor | None = None  # [W, N]; None: W = 1, only SiLU
    before: Tensor | None = None  # [rows, W - 1, N]
    after: Tensor | None = None  # the same; may be `before`

    @property
    def size(self) -> int:
        return 1 if self.taps is None else self.taps.shape[0]


def normed(x: Tensor, norm: tuple[Tensor, float], anchor: Window | None = None) -> tuple[Tensor, Tensor | None]:
    """RMSNorm(x) `[rows, D]`, and its convolution `[rows, D]` if there is an anchor. All tensors are contiguous."""
    rows, D = x.shape
    n, u = torch.empty_like(x), None if anchor is None else torch.empty_like(x)
    window = anchor or Window()
    width = tile_width(D)
    with device_guard(x):
        normed_kernel[(rows,)](
            x, norm[0], n, *window, u, rows, norm[1], D=D, W=window.size, BC=width, num_warps=8 if width > 1024 else 4
        )
    return n, u


def maps(
    x: Tensor,
    weights: list[Tensor],
    u: Tensor | None = None,
    weights_of_u: list[Tensor] | None = None,
    residual: Tensor | None = None,
    window: Window | None = None,
) -> Tensor:
    """Linear maps of x, then of u, both `[rows, D]`: `[rows, ΣN]`.

    All tensors are contiguous, weights in x's dtype. `window` is the first map's convolution.
    """
    (rows, D), every = x.shape, [*weights, *(weights_of_u or [])]
    sizes = tuple(w.shape[0] for w in every)
    y, tile, of_first = x.new_empty(rows, sum(sizes)), _tile(x, sizes), window or Window()
    tiles = sum(-(-size // tile["BN"]) for size in sizes)
    with device_guard(x):
        maps_kernel[(tiles * -(-rows // tile["BM"]),)](
            x, x if u is None else u, tuple(every), residual, y, *of_first, rows, SIZES=sizes, OF_X=len(weights),
            TILES=tiles, WIDTH=sum(sizes), D=D, W=0 if window is None else window.size, **tile,
        )  # fmt: skip
    return y


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate x) ⊙ up x `[rows, N]`, x `[rows, D]`."""
    (rows, D), N = x.shape, gate.shape[0]
    y, tile = x.new_empty(rows, N), _tile(x, (N,))
    with device_guard(x):
        gated_kernel[(-(-N // tile["BN"]) * -(-rows // tile["BM"]),)](x, gate, up, y, rows, D=D, N=N, **tile)
    return y


def _tile(x: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Rows and outputs of a program, and inputs per step: the most outputs with which all multiprocessors are busy."""
    rows, D = x.shape
    half = x.dtype != torch.float32
    BM = min(64, tile_width(rows))
    blocks = -(-rows // BM)
    wide = [BN for BN in (64, 32) if sum(-(-size // BN) for size in sizes) * blocks >= PROGRAMS]
    BN = wide[0] if wide else 16
    small = half and BM * BN <= 1024
    tile = {"BM": BM, "BN": BN, "BD": min(128 if half else 64, tile_width(D)), "PRECISION": "tf32" if half else "ieee"}
    return {**tile, "num_warps": 4, "num_stages": 6 if small else 4}
