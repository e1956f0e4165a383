"""The backward kernels of conv_columns.py; strips.py has the forward ones, and says how a program walks along a strip."""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.ops.short_conv import (
    convolved,
    document,
    documents_before,
    input_gradient,
    joined,
    pushed,
    repeated,
    rows_before,
    weight_sums,
    weights_of,
)
from prism.engine.kernels.ops.sigmoid import sigmoid
from prism.engine.kernels.ops.solver import correction
from prism.engine.kernels.ops.strips import gain_of, number_at, put_number, put_row, row_at, strip_of_a_head


@triton.jit
def differentiate_unit_row(x, d_y, eps):
    """The gradient of x, from that of `unit_row(x, eps)`."""
    inverse = 1.0 / (tl.sum(x * x, 0) + eps)
    return tl.sqrt(inverse) * (d_y - x * (inverse * tl.sum(x * d_y, 0)))


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
    D: tl.constexpr,
    H: tl.constexpr,
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
    token, head = b * T + first, (b * T + first) * H + h
    at_x, at_d_y = x + token * D + start + h * K, d_y + head * (1 + N) * K
    at_d_x, at_keys, at_d_keys = d_x + (token - (W - 1)) * D + start + h * K, keys, d_keys
    if keys is not None:
        at_keys += head * N * K
        at_d_keys += head * N * K
    for r in range(0, end - first + W - 1, UNROLL):
        values, places, answers, others, later = (), (), (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row_at(at_x + j * D + i, t < T),))
            answers = joined(answers, (row_at(at_d_y + j * H * (1 + N) * K + i, t < T),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            for l in tl.static_range(N):
                known = t < T
                if keys is not None:
                    known = t < end
                    others = joined(others, (row_at(at_keys + (j * H * N + l) * K + i, known),))
                later = joined(later, (row_at(at_d_y + (j * H * (1 + N) + 1 + l) * K + i, known),))
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
                    put_row(at_d_keys + (j * H * N + l) * K + i, d_key, t < end)
                else:
                    d_unit += later[j * N + l]
            s = sigmoid(z)
            y = z * s
            dz = differentiate_unit_row(y, d_unit, eps) * (s + y * (1.0 - s))
            own = tl.where(t < end, dz, 0.0)  # later tokens belong to the next strip
            sums = weight_sums(sums, own, values[j], now, before, numbers, W)
            dx = input_gradient(dz, now, gradients, numbers, factors, W)
            put_row(at_d_x + j * D + i, dx, (r + j >= W - 1) & (t - (W - 1) < end))
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
            gradients = pushed(dz, gradients, W - 1)
        at_x += UNROLL * D
        at_d_x += UNROLL * D
        at_d_y += UNROLL * H * (1 + N) * K
        if keys is not None:
            at_keys += UNROLL * H * N * K
            at_d_keys += UNROLL * H * N * K
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
        sizes = joined(sizes, (row_at(scale + (l * H + h) * V + i, h < H),))
    scaled = repeated(tl.zeros((V,), tl.float32), N)
    token, head = b * T + first, (b * T + first) * H + h
    at_x, at_d_x = x + token * D + start + h * V, d_x + (token - (W - 1)) * D + start + h * V
    at_d_w, one, several = d_w + head * (1 + N) * V, head * V, head * N * V
    for r in range(0, end - first + W - 1, UNROLL):
        values, places, firsts, steps, expected, gains, answers = (), (), (), (), (), (), ()
        for j in tl.static_range(UNROLL):  # all loads first: they wait for nothing
            t = first + r + j
            values = joined(values, (row_at(at_x + j * D + i, t < T),))
            firsts = joined(firsts, (number_at(beta + head + j * H, t < T),))
            answers = joined(answers, (row_at(at_d_w + j * H * (1 + N) * V + i, t < T),))
            if documents is not None:
                places = joined(places, (document(documents, b, t, T),))
            if N > 0 and u is not None:
                expected = joined(expected, (row_at(u + one + j * H * V + i, t < T),))
            for l in tl.static_range(N):
                answers = joined(answers, (row_at(at_d_w + (j * H * (1 + N) + 1 + l) * V + i, t < T),))
                steps = joined(steps, (number_at(betas + (head + j * H) * N + l, t < T),))
                if p is not None:
                    gains = joined(gains, (row_at(p + several + (j * H * N + l) * V + i, t < T),))
        for j in tl.static_range(UNROLL):
            t = first + r + j
            now = 0
            if documents is not None:
                now = places[j]
            z = convolved(values[j], now, before, numbers, factors, 0.0, W)
            s = sigmoid(z)
            y = z * s
            residual = y
            d_value = firsts[j] * answers[j * (1 + N)]  # type: ignore[var-annotated]  # a tensor
            put_number(d_beta + head + j * H, tl.sum(answers[j * (1 + N)] * y, 0), t < end)
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
                    put_number(d_betas + (head + j * H) * N + l, tl.sum(d_written * deltas[l], 0), t < end)
                    d_delta = d_written * steps[j * N + l] - d_residual
                    if p is not None:
                        put_row(d_p + several + (j * H * N + l) * V + i, d_delta * by_gain[l], t < end)
                    d_residual += d_delta * by_residual[l]
                scaled = more
                if u is not None:
                    put_row(d_u + one + j * H * V + i, -d_residual, t < end)
                d_value += d_residual
            dz = d_value * (s + y * (1.0 - s))
            own = tl.where(t < end, dz, 0.0)  # later tokens belong to the next strip
            sums = weight_sums(sums, own, values[j], now, before, numbers, W)
            dx = input_gradient(dz, now, gradients, numbers, factors, W)
            put_row(at_d_x + j * D + i, dx, (r + j >= W - 1) & (t - (W - 1) < end))
            before = pushed(values[j], before, W - 1)
            numbers = pushed(now, numbers, W - 1)
            gradients = pushed(dz, gradients, W - 1)
        at_x += UNROLL * D
        at_d_x += UNROLL * D
        at_d_w += UNROLL * H * (1 + N) * V
        head += UNROLL * H
        one += UNROLL * H * V
        several += UNROLL * H * N * V
    store_sums(d_weight, sums, c, D, H, W)
    for l in tl.static_range(N):
        strip = (tl.program_id(0) // H).to(tl.int64)
        put_row(d_scale + ((strip * N + l) * H + h) * V + i, scaled[l], h < H)
