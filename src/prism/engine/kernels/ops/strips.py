"""The forward kernels of conv_columns.py: a program walks along STRIP tokens of one head, as in short_conv.py.

It has in registers what the taps of the convolution reach: the last W - 1 rows of the projections and, in the backward
(strips_backward.py), of the gradient before the SiLU. Queries, keys and values do not depend on each other, so that each
has its own programs: the `unit` kernels compute queries or keys, the `write` kernels the writes.

Arithmetic limits these kernels, not memory. Widths are constants, and places advance from token to token, so that few
instructions compute addresses; where a token does not exist, one predicate covers its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.ops.short_conv import (
    convolved,
    document,
    documents_before,
    joined,
    pushed,
    rows_before,
    weights_of,
)
from prism.engine.kernels.ops.sigmoid import sigmoid
from prism.engine.kernels.ops.solver import correction


@triton.jit
def strip_of_a_head(T, H, STRIP: tl.constexpr):
    """The program's batch row, first token, end and head."""
    strip, strips = tl.program_id(0) // H, tl.cdiv(T, STRIP)
    first = strip % strips * STRIP
    return (strip // strips).to(tl.int64), first, tl.minimum(first + STRIP, T), tl.program_id(0) % H


@triton.jit
def all_or_none(place, there):
    """A mask for a row of places: one condition for all, so that one predicate serves them. (The interpreter does not
    repeat a condition, but a number.)"""
    return tl.zeros(place.shape, tl.int32) < there.to(tl.int32)


@triton.jit
def row_at(place, there):
    """What a row of places holds, in float32; zero if nothing is `there`."""
    return tl.load(place, mask=all_or_none(place, there), other=0.0).to(tl.float32)


@triton.jit
def number_at(place, there):
    """What one place holds, in float32; zero if nothing is `there`."""
    return tl.load(place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def put_row(place, value, there):
    """Store what `row_at` loads."""
    tl.store(place, value.to(place.dtype.element_ty), mask=all_or_none(place, there))


@triton.jit
def put_number(place, value, there):
    """Store what `number_at` loads."""
    tl.store(place, value.to(place.dtype.element_ty), mask=there)


@triton.jit
def unit_row(x, eps):
    """x divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def gain_of(gains, i: tl.constexpr, GAINS: tl.constexpr, GELU: tl.constexpr):
    """One of the gains, or the constant in its place (see `load_gain` in solver.py)."""
    if GAINS:
        return gains[i]
    else:
        return 1.0 if GELU else 0.5


@triton.jit(do_not_specialize=["T"])
def unit_strip_kernel(
    x,
    weight,
    window,
    documents,
    keys,
    y,
    scale,
    eps,
    start,
    T,
    D: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    STRIP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Queries or keys: the channels of x `[B, T, D]` from `start` on → y `[B, T, H, 1 + N, K]`: unit rows times `scale`, then
    the N later `keys` `[B, T, H, N, K]` as unit rows (None: the first key again)."""
    b, first, end, h = strip_of_a_head(T, H, STRIP)
    i = tl.arange(0, K)
    c = start + h * K + i
    factors = weights_of(weight, c, D, W)
    before = rows_before(x, window, b, first, c, T, D, W)
    numbers = documents_before(documents, b, first, T, W)
    token, head = b * T + first, (b * T + first) * H + h
    at_x, at_y, at_keys = x + token * D + start + h * K, y + head * (1 + N) * K, keys
    if keys is not None:
        at_keys += head * N * K
    for r in range(0, end - first, UNROLL):
        values, places, others = (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row_at(at_x + j * D + i, t < end),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            if keys is not None:
                for l in tl.static_range(N):
                    others = joined(others, (row_at(at_keys + (j * H * N + l) * K + i, t < end),))
        for j in tl.static_range(UNROLL):
            known = first + r + j < end
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            direction = unit_row(z * sigmoid(z), eps) * scale
            put_row(at_y + j * H * (1 + N) * K + i, direction, known)
            for l in tl.static_range(N):
                if keys is not None:
                    direction = unit_row(others[j * N + l], eps)
                put_row(at_y + (j * H * (1 + N) + 1 + l) * K + i, direction, known)
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
        at_x += UNROLL * D
        at_y += UNROLL * H * (1 + N) * K
        if keys is not None:
            at_keys += UNROLL * H * N * K


@triton.jit(do_not_specialize=["T"])
def write_strip_kernel(
    x,
    weight,
    window,
    documents,
    beta,
    u,
    p,
    betas,
    scale,
    w,
    start,
    T,
    D: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
    STRIP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Writes: the channels of x `[B, T, D]` from `start` on → w `[B, T, H, 1 + N, V]`. Other shapes: see columns.py."""
    b, first, end, h = strip_of_a_head(T, H, STRIP)
    i = tl.arange(0, V)
    c = start + h * V + i
    factors = weights_of(weight, c, D, W)
    before = rows_before(x, window, b, first, c, T, D, W)
    numbers = documents_before(documents, b, first, T, W)
    sizes = ()
    for l in tl.static_range(N):
        sizes = joined(sizes, (row_at(scale + (l * H + h) * V + i, h < H),))
    token, head = b * T + first, (b * T + first) * H + h
    at_x, at_w, at_u, at_p = x + token * D + start + h * V, w + head * (1 + N) * V, u, p
    at_beta, at_betas = beta + head, betas
    if u is not None:
        at_u += head * V
    if p is not None:
        at_p += head * N * V
    if N > 0:
        at_betas += head * N
    for r in range(0, end - first, UNROLL):
        values, places, firsts, steps, expected, gains = (), (), (), (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row_at(at_x + j * D + i, t < end),))
            firsts = joined(firsts, (number_at(at_beta + j * H, t < end),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            if N > 0 and u is not None:
                expected = joined(expected, (row_at(at_u + j * H * V + i, t < end),))
            for l in tl.static_range(N):
                steps = joined(steps, (number_at(at_betas + j * H * N + l, t < end),))
                if p is not None:
                    gains = joined(gains, (row_at(at_p + (j * H * N + l) * V + i, t < end),))
        for j in tl.static_range(UNROLL):
            known = first + r + j < end
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            residual = z * sigmoid(z)
            put_row(at_w + j * H * (1 + N) * V + i, firsts[j] * residual, known)
            if N > 0 and u is not None:
                residual -= expected[j]
            for l in tl.static_range(N):
                gain = gain_of(gains, j * N + l, p is not None, GELU)
                delta, _, _ = correction(gain, residual, p is not None, GELU, NONLINEAR)
                put_row(at_w + (j * H * (1 + N) + 1 + l) * V + i, delta * steps[j * N + l] * sizes[l], known)
                residual -= delta
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
        at_x += UNROLL * D
        at_w += UNROLL * H * (1 + N) * V
        at_beta += UNROLL * H
        if N > 0:
            at_betas += UNROLL * H * N
        if u is not None:
            at_u += UNROLL * H * V
        if p is not None:
            at_p += UNROLL * H * N * V
