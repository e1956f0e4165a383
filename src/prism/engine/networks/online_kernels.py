# mypy: ignore-errors
# (kernels are Triton's language, which has no Python types)
"""Online descent of a two-layer network in one kernel a sequence: weights stay in registers from the first token to the last.

A program runs one head of one sequence, token after token. W1 is `[D, M]` and W2 is kept turned, `[D, M]` too, so that every
product with a vector is a sum over rows or columns of such a tile. The backward walks from the last token to the first. It
does not store the weights of every token: a step is undone by adding back what it took, W_{t-1} = W_t + c (rank one), and
where an equation wants W_{t-1} it gets W_t and a dot product more.

Tokens' tensors are `[B, T, H, D]`, what the forward leaves for the backward `[B, T, H, ·]`, weights `[B, H, D, M]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def _tanh(x):
    # e^{-2|x|} cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _gelu(x):
    """Tanh GELU, its first and its second derivative."""
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
    """δ = ∂½‖[LN](z) - target‖²/∂z, and what its own derivative needs: normal, 1/σ, the error, its gradient."""
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
def forward_kernel(
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
        # The next token is on its way while this one is computed.
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
def backward_kernel(
    q, k, target, rate, scale, shift,
    w1, w2,
    saved_z1, saved_back, saved_z2, saved_asked,
    d_out,
    d_w1, d_b1, d_w2, d_b2,
    d_q, d_k, d_target, d_rate, d_scale, d_shift,
    T, H,
    D: tl.constexpr, M: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`w1`, `w2`: a copy of the last weights, turned back to the first. `d_w1` …: gradients of the last, then of the first.

    Registers are short: only the gradient of W2 stays in them. Tiles are loaded again at each use (they are in the cache),
    and what the forward saved is loaded, and its GELU computed, where it is used.
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

        # The answer, by the weights after the step.
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

        # The gradient's first layer: δ1 = (W2ᵀ δ2) gelu'(z1), by the weights before the step.
        d_back = d_delta1 * slope
        A2 += delta2[:, None] * d_back[None, :]
        d_delta2 += tl.sum(tl.load(w2 + tile) * d_back[None, :], 1) + c * delta2 * tl.sum(x2 * d_back, 0)

        # Its last layer: δ2 from z2.
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

        # The network on the key. Then the step is undone.
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
