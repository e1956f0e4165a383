"""The kernels of conv_columns.py: a program walks along STRIP tokens of one head, as in short_conv.py.

It has in registers what the taps of the convolution reach: the last W - 1 rows of the projections and, in the backward, of the
gradient before the SiLU. Queries, keys and values do not depend on each other, so that each has its own programs: the
`unit` kernels compute queries or keys, the `write` kernels the writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.short_conv import (
    convolved,
    document,
    documents_before,
    input_gradient,
    joined,
    pushed,
    repeated,
    row,
    rows_before,
    weight_sums,
    weights_of,
)
from prism.engine.kernels.solver import correction


@triton.jit
def strip_of_a_head(T, H, STRIP: tl.constexpr):
    """The program's batch row, first token, end and head."""
    strip, strips = tl.program_id(0) // H, tl.cdiv(T, STRIP)
    first = strip % strips * STRIP
    return (strip // strips).to(tl.int64), first, tl.minimum(first + STRIP, T), tl.program_id(0) % H


@triton.jit
def load_head(x, token, h, i, there, c, H, N, WIDTH):
    """Row i of the N rows of a head, x `[B·T, H, N, WIDTH]`, in float32; zero where nothing is `there`."""
    place = x + ((token * H + h) * N + i) * WIDTH + c
    return tl.load(place, mask=c < tl.where(there, WIDTH, 0), other=0.0).to(tl.float32)


@triton.jit
def store_head(x, value, token, h, i, there, c, H, N, WIDTH):
    """Store what `load_head` loads."""
    place = x + ((token * H + h) * N + i) * WIDTH + c
    tl.store(place, value.to(x.dtype.element_ty), mask=c < tl.where(there, WIDTH, 0))


@triton.jit
def unit_row(x, eps):
    """x divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def differentiate_unit_row(x, d_y, eps):
    """The gradient of x, from that of `unit_row(x, eps)`."""
    inverse = 1.0 / (tl.sum(x * x, 0) + eps)
    return tl.sqrt(inverse) * (d_y - x * (inverse * tl.sum(x * d_y, 0)))


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
    D,
    H,
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
    for r in range(0, end - first, UNROLL):
        values, places, others = (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row(x, b, t, c, T, D),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            if keys is not None:
                for l in tl.static_range(N):
                    others = joined(others, (load_head(keys, b * T + t, h, l, t < end, i, H, N, K),))
        for j in tl.static_range(UNROLL):
            t = first + r + j
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            direction = unit_row(z * tl.sigmoid(z), eps) * scale
            store_head(y, direction, b * T + t, h, 0, t < end, i, H, 1 + N, K)
            for l in tl.static_range(N):
                if keys is not None:
                    direction = unit_row(others[j * N + l], eps)
                store_head(y, direction, b * T + t, h, 1 + l, t < end, i, H, 1 + N, K)
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)


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
    D,
    H,
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
        sizes = joined(sizes, (load_head(scale, l, h, 0, h < H, i, H, 1, V),))
    for r in range(0, end - first, UNROLL):
        values, places, firsts, steps, expected, gains = (), (), (), (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row(x, b, t, c, T, D),))
            firsts = joined(firsts, (load_head(beta, b * T + t, h, 0, t < end, 0, H, 1, 1),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            if N > 0 and u is not None:
                expected = joined(expected, (load_head(u, b * T + t, h, 0, t < end, i, H, 1, V),))
            for l in tl.static_range(N):
                steps = joined(steps, (load_head(betas, b * T + t, h, l, t < end, 0, H, N, 1),))
                if p is not None:
                    gains = joined(gains, (load_head(p, b * T + t, h, l, t < end, i, H, N, V),))
        for j in tl.static_range(UNROLL):
            t = first + r + j
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            residual = z * tl.sigmoid(z)
            store_head(w, firsts[j] * residual, b * T + t, h, 0, t < end, i, H, 1 + N, V)
            if N > 0 and u is not None:
                residual -= expected[j]
            for l in tl.static_range(N):
                gain = gain_of(gains, j * N + l, p is not None, GELU)
                delta, _, _ = correction(gain, residual, p is not None, GELU, NONLINEAR)
                written = delta * steps[j * N + l] * sizes[l]
                store_head(w, written, b * T + t, h, 1 + l, t < end, i, H, 1 + N, V)
                residual -= delta
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)


@triton.jit
def store_sums(d_weight, sums, c, D, H, W: tl.constexpr):
    """Store a strip's sums of the weights' gradients in `[strips, W, D]`."""
    strip = (tl.program_id(0) // H).to(tl.int64)
    for back in tl.static_range(W):
        tl.store(d_weight + (strip * W + W - 1 - back) * D + c, sums[back])


@triton.jit(do_not_specialize=["T"])
def unit_strip_backward_kernel(
    x,
    weight,
    window,
    documents,
    keys,
    d_y,
    d_x,
    d_keys,
    d_weight,
    scale,
    eps,
    start,
    T,
    D,
    H,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    STRIP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The gradients of `unit_strip_kernel`. dx of a strip's last tokens needs dz of the W - 1 tokens after it, which are
    computed again."""
    b, first, end, h = strip_of_a_head(T, H, STRIP)
    i = tl.arange(0, K)
    c = start + h * K + i
    factors = weights_of(weight, c, D, W)
    before = rows_before(x, window, b, first, c, T, D, W)
    numbers = documents_before(documents, b, first, T, W)
    gradients = repeated(tl.zeros((K,), tl.float32), W - 1)
    sums = repeated(tl.zeros((K,), tl.float32), W)
    for r in range(0, end - first + W - 1, UNROLL):
        values, places, answers, others, later = (), (), (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row(x, b, t, c, T, D),))
            answers = joined(answers, (load_head(d_y, b * T + t, h, 0, t < T, i, H, 1 + N, K),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            for l in tl.static_range(N):
                if keys is not None:
                    others = joined(others, (load_head(keys, b * T + t, h, l, t < end, i, H, N, K),))
                    later = joined(later, (load_head(d_y, b * T + t, h, 1 + l, t < end, i, H, 1 + N, K),))
                else:
                    later = joined(later, (load_head(d_y, b * T + t, h, 1 + l, t < T, i, H, 1 + N, K),))
        for j in tl.static_range(UNROLL):
            t = first + r + j
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            d_unit = scale * answers[j]
            for l in tl.static_range(N):
                if keys is not None:
                    d_key = differentiate_unit_row(others[j * N + l], later[j * N + l], eps)
                    store_head(d_keys, d_key, b * T + t, h, l, t < end, i, H, N, K)
                else:
                    d_unit += later[j * N + l]
            s = tl.sigmoid(z)
            dz = differentiate_unit_row(z * s, d_unit, eps) * s * (1.0 + z * (1.0 - s))
            own = tl.where(t < end, dz, 0.0)  # later tokens belong to the next strip
            sums = weight_sums(sums, own, values[j], now, before, numbers, W)
            done = t - (W - 1)
            dx = input_gradient(dz, now, gradients, numbers, factors, W)
            store_head(d_x, dx, b * T + done, 0, 0, (done >= first) & (done < end), c, 1, 1, D)
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
            gradients = pushed(dz, gradients, W - 1)
    store_sums(d_weight, sums, c, D, H, W)


@triton.jit(do_not_specialize=["T"])
def write_strip_backward_kernel(
    x,
    weight,
    window,
    documents,
    beta,
    u,
    p,
    betas,
    scale,
    d_w,
    d_x,
    d_beta,
    d_u,
    d_p,
    d_betas,
    d_weight,
    d_scale,
    start,
    T,
    D,
    H,
    N: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
    STRIP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The gradients of `write_strip_kernel`; that of γ is summed over the strip, `[strips, N, H, V]`."""
    b, first, end, h = strip_of_a_head(T, H, STRIP)
    i = tl.arange(0, V)
    c = start + h * V + i
    factors = weights_of(weight, c, D, W)
    before = rows_before(x, window, b, first, c, T, D, W)
    numbers = documents_before(documents, b, first, T, W)
    gradients = repeated(tl.zeros((V,), tl.float32), W - 1)
    sums = repeated(tl.zeros((V,), tl.float32), W)
    sizes = ()
    for l in tl.static_range(N):
        sizes = joined(sizes, (load_head(scale, l, h, 0, h < H, i, H, 1, V),))
    scaled = repeated(tl.zeros((V,), tl.float32), N)
    for r in range(0, end - first + W - 1, UNROLL):
        values, places, firsts, steps, expected, gains, answers = (), (), (), (), (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row(x, b, t, c, T, D),))
            firsts = joined(firsts, (load_head(beta, b * T + t, h, 0, t < T, 0, H, 1, 1),))
            answers = joined(answers, (load_head(d_w, b * T + t, h, 0, t < T, i, H, 1 + N, V),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            if N > 0 and u is not None:
                expected = joined(expected, (load_head(u, b * T + t, h, 0, t < T, i, H, 1, V),))
            for l in tl.static_range(N):
                answers = joined(answers, (load_head(d_w, b * T + t, h, 1 + l, t < T, i, H, 1 + N, V),))
                steps = joined(steps, (load_head(betas, b * T + t, h, l, t < T, 0, H, N, 1),))
                if p is not None:
                    gains = joined(gains, (load_head(p, b * T + t, h, l, t < T, i, H, N, V),))
        for j in tl.static_range(UNROLL):
            t = first + r + j
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            s = tl.sigmoid(z)
            residual = z * s
            d_value = firsts[j] * answers[j * (1 + N)]  # type: ignore[var-annotated]  # a tensor
            store_head(d_beta, tl.sum(answers[j * (1 + N)] * residual, 0), b * T + t, h, 0, t < end, 0, H, 1, 1)
            if N > 0:
                if u is not None:
                    residual -= expected[j]
                deltas, by_residual, by_gain = (), (), ()
                for l in tl.static_range(N):
                    gain = gain_of(gains, j * N + l, p is not None, GELU)
                    delta, slope, gain_slope = correction(gain, residual, p is not None, GELU, NONLINEAR)
                    residual -= delta
                    deltas, by_residual = joined(deltas, (delta,)), joined(by_residual, (slope,))
                    by_gain = joined(by_gain, (gain_slope,))
                d_residual, more = tl.zeros((V,), tl.float32), ()
                for l in tl.static_range(N - 1, -1, -1):
                    d_written = answers[j * (1 + N) + 1 + l]  # type: ignore[var-annotated]  # a tensor
                    own = tl.where(t < end, d_written, 0.0) * steps[j * N + l]
                    more = joined((scaled[l] + own * deltas[l],), more)
                    d_written *= sizes[l]
                    d_step = tl.sum(d_written * deltas[l], 0)
                    store_head(d_betas, d_step, b * T + t, h, l, t < end, 0, H, N, 1)
                    d_delta = d_written * steps[j * N + l] - d_residual
                    if p is not None:
                        store_head(d_p, d_delta * by_gain[l], b * T + t, h, l, t < end, i, H, N, V)
                    d_residual += d_delta * by_residual[l]
                scaled = more
                if u is not None:
                    store_head(d_u, -d_residual, b * T + t, h, 0, t < end, i, H, 1, V)
                d_value += d_residual
            dz = d_value * s * (1.0 + z * (1.0 - s))
            own = tl.where(t < end, dz, 0.0)  # later tokens belong to the next strip
            sums = weight_sums(sums, own, values[j], now, before, numbers, W)
            done = t - (W - 1)
            dx = input_gradient(dz, now, gradients, numbers, factors, W)
            store_head(d_x, dx, b * T + done, 0, 0, (done >= first) & (done < end), c, 1, 1, D)
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
            gradients = pushed(dz, gradients, W - 1)
    store_sums(d_weight, sums, c, D, H, W)
    for l in tl.static_range(N):
        store_head(d_scale, scaled[l], (tl.program_id(0) // H).to(tl.int64) * N + l, h, 0, h < H, i, H, 1, V)
