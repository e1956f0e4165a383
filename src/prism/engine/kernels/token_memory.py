"""The memory of a delta rule for one token per row, from the layer's projections to the gated norm of its output.

    S ← α S;   S ← S + k (β (v - Sᵀk))ᵀ for every sub-step;   S ← S + k_l w_lᵀ for PRISM's later writes;   o = Sᵀq
    y = RMSNorm(o) ⊙ SiLU(gate)

with q = K^-½ unit(q̃), k = unit(k̃), β = c σ(·), α = exp(-e^A softplus(· + bias)) and PRISM's solver (solver.py). The second
halves of PRISM's low-rank maps are computed here too: a head reads its own rows of them. One program holds a head of one row.
The state is read once and written once, in the dtype that it has; everything in between is float32. Wide values are taken
BV channels after the other, and normalised at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.solver import correction

MOST_ELEMENTS = 32768
"""Elements of the state that a program holds in registers."""


@triton.jit
def vector(pointer, i, N: tl.constexpr):
    """`[BN]` of a vector of N numbers, in float32."""
    return tl.load(pointer + i, mask=i < N, other=0.0).to(tl.float32)


@triton.jit
def unit_vector(x, eps):
    """x `[N]` divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def widened(up, low, first, i, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """Rows first + i of `up` `[…, R]` times the vector at `low`: `[BN]`."""
    r = tl.arange(0, BR)
    place = (first + i)[:, None] * R + r[None, :]
    weights = tl.load(up + place, mask=(i < N)[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)
    return tl.sum(weights * vector(low, r, R)[None, :], 1)


@triton.jit
def softplus(x):
    """log(1 + eˣ), with all digits where it is small: a decay near 1 depends on them."""
    e = tl.exp(-tl.abs(x))
    total = 1.0 + e
    rest = total - 1.0  # what the sum kept of e
    return tl.maximum(x, 0.0) + tl.where(rest == 0.0, e, tl.log(total) * (e / tl.where(rest == 0.0, 1.0, rest)))


@triton.jit(do_not_specialize=["H", "width", "at_beta", "at_decay", "at_gate", "low_width"])
def delta_token_kernel(
    given,
    low,
    key_up,
    gain_up,
    expected_up,
    scale,
    log_rate,
    rate_bias,
    norm,
    state,
    new_state,
    raw,
    y,
    query_scale,
    beta_scale,
    unit_eps,
    norm_eps,
    H,
    width,
    at_beta,
    at_decay,
    at_gate,
    low_width,
    SUBSTEPS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    """given `[rows, width]`: q̃, k̃, v after the convolution, and β, decay and gate at their places. low `[rows, low_width]`:
    what `key_up`, `gain_up` and `expected_up` widen (those that are not None, R each), then the later writes' β `[H, N]`.
    scale `[N, H, V]`, log_rate and rate_bias `[H]` (None: no decay), norm `[V]`, state `[rows, H, K, V]`, y `[rows, H·V]`. raw
    is scratch memory like y, None if BV holds all values."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    row, h = (pid // H).to(tl.int64), pid % H
    c = tl.arange(0, BK)
    token, narrow = given + row * width, low + row * low_width
    low_gain = narrow + (0 if key_up is None else R)
    low_expected = low_gain + (0 if gain_up is None else R)
    low_beta = low_expected + (0 if expected_up is None else R)
    values = token + H * (1 + SUBSTEPS) * K
    q = query_scale * unit_vector(vector(token + h * K, c, K), unit_eps)
    alpha = 1.0
    if log_rate is not None:
        z = tl.load(token + at_decay + h).to(tl.float32) + tl.load(rate_bias + h).to(tl.float32)
        alpha = tl.exp(-tl.exp(tl.load(log_rate + h).to(tl.float32)) * softplus(z))
    squares = 0.0
    for block in tl.static_range(BLOCKS):
        vs = block * BV + tl.arange(0, BV)
        place = (row * H + h) * (K * V) + c[:, None] * V + vs[None, :]
        inside = (c < K)[:, None] & (vs < V)[None, :]
        S = tl.load(state + place, mask=inside, other=0.0).to(tl.float32) * alpha
        for s in tl.static_range(SUBSTEPS):
            key = unit_vector(vector(token + (H * (1 + s) + h) * K, c, K), unit_eps)
            value = vector(values + (s * H + h) * V, vs, V)
            beta = beta_scale * tl.sigmoid(tl.load(token + at_beta + s * H + h).to(tl.float32))
            seen = tl.sum(S * key[:, None], 0)
            S += key[:, None] * (beta * (value - seen))[None, :]
        if N > 0:
            residual = value
            if expected_up is not None:
                residual -= widened(expected_up, low_expected, h * V, vs, V, R, BR)
            for l in tl.static_range(N):
                if key_up is not None:
                    key = unit_vector(widened(key_up, narrow, (h * N + l) * K, c, K, R, BR), unit_eps)
                gain = 1.0 if GELU else 0.5
                if gain_up is not None:
                    gain = widened(gain_up, low_gain, (h * N + l) * V, vs, V, R, BR)
                delta, _, _ = correction(gain, residual, gain_up is not None, GELU, NONLINEAR)
                beta = tl.sigmoid(tl.load(low_beta + h * N + l).to(tl.float32))
                S += key[:, None] * (delta * beta * vector(scale + (l * H + h) * V, vs, V))[None, :]
                residual -= delta
        out = tl.sum(S * q[:, None], 0)
        squares += tl.sum(out * out, 0)
        tl.debug_barrier()  # `new_state` may be `state`: all threads have read
        tl.store(new_state + place, S.to(new_state.dtype.element_ty), mask=inside)
        if BLOCKS > 1:
            tl.store(raw + (row * H + h) * V + vs, out, mask=vs < V)
    if BLOCKS > 1:
        tl.debug_barrier()
    for block in tl.static_range(BLOCKS):
        vs = block * BV + tl.arange(0, BV)
        if BLOCKS > 1:
            out = vector(raw + (row * H + h) * V, vs, V)
        result = out * tl.rsqrt(squares / V + norm_eps)
        if norm is not None:
            result *= vector(norm, vs, V)
        if GATE:
            gate = vector(token + at_gate + h * V, vs, V)
            result *= gate * tl.sigmoid(gate)
        tl.store(y + (row * H + h) * V + vs, result.to(y.dtype.element_ty), mask=vs < V)


class DeltaSizes(NamedTuple):
    """Numbers that say how a token's projections are laid out and used."""

    heads: int
    key_dim: int
    value_dim: int
    substeps: int
    at_beta: int
    at_decay: int
    at_gate: int
    """Places of β, decay and gate in a row of `given`; -1 for a gate that does not exist."""
    beta_scale: float
    norm_eps: float
    unit_eps: float


class LaterWrites(NamedTuple):
    """PRISM's later writes: the outputs of its maps' first halves, and the weights of their second ones."""

    low: Tensor  # [rows, low_width]
    key_up: Tensor | None  # [H·N·K, R]
    gain_up: Tensor | None  # [H·N·V, R]
    expected_up: Tensor | None  # [H·V, R]
    scale: Tensor  # [N, H, V]
    gelu: bool
    nonlinear: bool


def delta_token(
    given: Tensor,
    sizes: DeltaSizes,
    decay: tuple[Tensor, Tensor] | None,
    norm: Tensor | None,
    writes: LaterWrites | None,
    state: Tensor,
    new_state: Tensor,
) -> Tensor:
    """y `[rows, H·V]`, before the output projection. Writes `new_state`, which may be `state`. All tensors are contiguous."""
    rows, (H, K, V) = given.shape[0], sizes[:3]
    y = given.new_empty(rows, H * V)
    BK = tile_width(K)
    BV = min(tile_width(V), max(16, MOST_ELEMENTS // BK))
    raw = None if BV >= V else y.new_empty(y.shape, dtype=torch.float32)
    ups = (None,) * 3 if writes is None else writes[1:4]
    R = next((up.shape[1] for up in ups if up is not None), 1)
    N = 0 if writes is None else writes.scale.shape[0]
    with device_guard(given):
        delta_token_kernel[(rows * H,)](
            given, given if writes is None else writes.low, *ups, None if writes is None else writes.scale,
            *(decay or (None, None)), norm, state, new_state, raw, y,
            K**-0.5, sizes.beta_scale, sizes.unit_eps, sizes.norm_eps,
            H, given.shape[1], sizes.at_beta, sizes.at_decay, sizes.at_gate, 0 if writes is None else writes.low.shape[1],
            SUBSTEPS=sizes.substeps, N=N, R=R, K=K, V=V, BR=tile_width(R), BK=BK, BV=BV, GATE=sizes.at_gate >= 0,
            GELU=writes is not None and writes.gelu, NONLINEAR=writes is None or writes.nonlinear,
            num_warps=4 if BK * BV < 16384 else 8 if BK * BV < 32768 else 16,
        )  # fmt: skip
    return y
