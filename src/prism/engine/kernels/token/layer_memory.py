"""The memory of a delta rule for one token per row, from the layer's projections to the gated norm of its output.

    S ← α S;   S ← S + k (β (v - Sᵀk))ᵀ for every sub-step;   S ← S + k_l w_lᵀ for PRISM's later writes;   o = Sᵀq
    y = RMSNorm(o) ⊙ SiLU(gate), or ⊙ σ(gate)

with q = K^-½ unit(q̃), k = unit(k̃), β = c σ(·), α = exp(-e^A softplus(· + bias)) per head or key channel (or KDA's bounded
one), and PRISM's solver (solver.py). The second halves of low-rank maps are computed here too: a head reads its own rows of
them. One program holds a head of one row. The state is read once and written once, in the dtype that it has; everything in
between is float32. Wide values are taken BV channels after the other, and normalised at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.available import device_guard, tile_width
from prism.engine.kernels.ops.short_conv import joined
from prism.engine.kernels.ops.solver import correction

if TYPE_CHECKING:
    from prism.engine.token import DeltaWeights

ELEMENTS, MOST_BLOCKS = 8192, 4
"""Elements of the state that a program holds in registers: more at a time was slower. Wide heads take at most four blocks,
because the code of every block is compiled."""


@triton.jit
def vector(pointer, i, N: tl.constexpr):
    """`[BN]` of a vector of N numbers, in float32."""
    return tl.load(pointer + i, mask=i < N, other=0.0).to(tl.float32)


@triton.jit
def unit_vector(x, eps):
    """x `[N]` divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def softplus(x):
    """log(1 + eˣ), with all digits where it is small: a decay near 1 depends on them."""
    e = tl.exp(-tl.abs(x))
    total = 1.0 + e
    rest = total - 1.0  # what the sum kept of e
    return tl.maximum(x, 0.0) + tl.where(rest == 0.0, e, tl.log(total) * (e / tl.where(rest == 0.0, 1.0, rest)))


@triton.jit
def loaded_rows(up, first, i, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """Rows first + i of `up` `[…, R]`, `[BN, BR]`."""
    r = tl.arange(0, BR)
    return tl.load(up + (first + i)[:, None] * R + r[None, :], mask=(i < N)[:, None] & (r < R)[None, :], other=0.0)


@triton.jit
def loaded_vectors(pointer, step, i, N: tl.constexpr, COUNT: tl.constexpr):
    """COUNT vectors of N numbers as a tuple, `step` numbers apart."""
    found = ()
    for s in tl.static_range(COUNT):
        found = joined(found, (vector(pointer + s * step, i, N),))
    return found


@triton.jit
def loaded_numbers(pointer, step, COUNT: tl.constexpr):
    """COUNT numbers as a tuple, `step` apart."""
    found = ()
    for s in tl.static_range(COUNT):
        found = joined(found, (tl.load(pointer + s * step).to(tl.float32),))
    return found


@triton.jit
def loaded_each(up, first, step, i, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, COUNT: tl.constexpr):
    """COUNT such tiles as a tuple, `step` rows apart; empty if `up` is None."""
    tiles = ()
    if up is not None:
        for l in tl.static_range(COUNT):
            tiles = joined(tiles, (loaded_rows(up, first + l * step, i, N, R, BR),))
    return tiles


@triton.jit
def widened(rows, low):
    """`[BN, BR]` times the vector `[BR]`: the second half of a low-rank map."""
    return tl.sum(rows.to(tl.float32) * low[None, :], 1)


@triton.jit
def output_gate(given, up, bias, h, vs, V: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """The head's gate before its activation, `[BV]`: given, or the second half of a low-rank map."""
    if up is None:
        return vector(given + h * V, vs, V)
    else:  # Triton also compiles code after a return
        gate = widened(loaded_rows(up, h * V, vs, V, R, BR), vector(given, tl.arange(0, BR), R))
        return gate if bias is None else gate + vector(bias + h * V, vs, V)


@triton.jit
def decay_of(z, log_rate, BOUND: tl.constexpr):
    """α, from the gate's input z with its bias: a number, or one per key channel."""
    rate = tl.exp(log_rate)
    if BOUND < 0.0:
        return tl.exp(BOUND * tl.sigmoid(rate * z))
    else:  # Triton also compiles code after a return
        return tl.exp(-rate * softplus(z))


@triton.jit(do_not_specialize=["H", "width", "at_beta", "at_decay", "at_gate", "at_low"])
def delta_token_kernel(
    given,
    key_up,
    gain_up,
    expected_up,
    scale,
    log_rate,
    rate_bias,
    decay_up,
    gate_up,
    gate_bias,
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
    at_low,
    SUBSTEPS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    RANK: tl.constexpr,
    GATE_RANK: tl.constexpr,
    BRANK: tl.constexpr,
    BGATE: tl.constexpr,
    BOUND: tl.constexpr,
    GATE: tl.constexpr,
    GELU: tl.constexpr,
    NONLINEAR: tl.constexpr,
):
    """given `[rows, width]`: q̃, k̃, v after the convolution, and at their places β, decay, gate and `low`: what `key_up`,
    `gain_up` and `expected_up` widen (those that are not None, R each), then the later writes' β `[H, N]`. scale `[N, H, V]`,
    log_rate `[H]` (None: no decay), rate_bias `[H]`, or `[H·K]` with decay_up `[H·K, RANK]`, gate_up `[H·V, GATE_RANK]` and its
    bias (None: the gate itself is given), norm `[V]`, state `[rows, H, K, V]`, y `[rows, H·V]`. raw is scratch memory like y,
    None if BV holds all values. BOUND 0: the softplus gate; GATE: none, silu or sigmoid.

    Whatever can be loaded is loaded first, so that the loads wait together."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    row, h = (pid // H).to(tl.int64), pid % H
    c, r = tl.arange(0, BK), tl.arange(0, BR)
    token = given + row * width
    low_key = token + at_low
    low_gain = low_key + (0 if key_up is None else R)
    low_expected = low_gain + (0 if gain_up is None else R)
    low_beta = low_expected + (0 if expected_up is None else R)
    values = token + H * (1 + SUBSTEPS) * K
    squares = 0.0
    for block in tl.static_range(BLOCKS):
        vs = block * BV + tl.arange(0, BV)
        place = (row * H + h) * (K * V) + c[:, None] * V + vs[None, :]
        inside = (c < K)[:, None] & (vs < V)[None, :]
        S = tl.load(state + place, mask=inside, other=0.0).to(tl.float32)
        q = vector(token + h * K, c, K)
        keys = loaded_vectors(token + (H + h) * K, H * K, c, K, SUBSTEPS)
        fresh = loaded_vectors(values + h * V, H * V, vs, V, SUBSTEPS)
        betas = loaded_numbers(token + at_beta + h, H, SUBSTEPS)
        weight = vector(norm, vs, V)
        gate = 0.0
        if GATE != "none":
            gate = output_gate(token + at_gate, gate_up, gate_bias, h, vs, V, GATE_RANK, BGATE)
        if log_rate is not None:
            rate = tl.load(log_rate + h).to(tl.float32)
            if decay_up is None:
                z = tl.load(token + at_decay + h).to(tl.float32) + tl.load(rate_bias + h).to(tl.float32)
            else:
                low_decay = vector(token + at_decay, tl.arange(0, BRANK), RANK)
                z = widened(loaded_rows(decay_up, h * K, c, K, RANK, BRANK), low_decay)
                z = (z + vector(rate_bias + h * K, c, K))[:, None]
        if N > 0:
            key_rows = loaded_each(key_up, h * N * K, K, c, K, R, BR, N)
            gain_rows = loaded_each(gain_up, h * N * V, V, vs, V, R, BR, N)
            expected_rows = loaded_each(expected_up, h * V, V, vs, V, R, BR, 1)
            scales = loaded_vectors(scale + h * V, H * V, vs, V, N)
            later_betas = loaded_numbers(low_beta + h * N, 1, N)
            low_k = vector(low_key, r, R) if key_up is not None else 0.0
            low_g = vector(low_gain, r, R) if gain_up is not None else 0.0
            low_e = vector(low_expected, r, R) if expected_up is not None else 0.0
        if log_rate is not None:
            S *= decay_of(z, rate, BOUND)
        for s in tl.static_range(SUBSTEPS):
            key, value = unit_vector(keys[s], unit_eps), fresh[s]
            seen = tl.sum(S * key[:, None], 0)
            S += key[:, None] * (beta_scale * tl.sigmoid(betas[s]) * (value - seen))[None, :]
        if N > 0:
            residual = value
            if expected_up is not None:
                residual -= widened(expected_rows[0], low_e)
            for l in tl.static_range(N):
                if key_up is not None:
                    key = unit_vector(widened(key_rows[l], low_k), unit_eps)
                gain = 1.0 if GELU else 0.5
                if gain_up is not None:
                    gain = widened(gain_rows[l], low_g)
                delta, _, _ = correction(gain, residual, gain_up is not None, GELU, NONLINEAR)
                S += key[:, None] * (delta * tl.sigmoid(later_betas[l]) * scales[l])[None, :]
                residual -= delta
        out = tl.sum(S * (query_scale * unit_vector(q, unit_eps))[:, None], 0)
        tl.debug_barrier()  # `new_state` may be `state`: all threads have read
        tl.store(new_state + place, S.to(new_state.dtype.element_ty), mask=inside)
        squares += tl.sum(out * out, 0)
        if BLOCKS > 1:
            tl.store(raw + (row * H + h) * V + vs, out, mask=vs < V)
    if BLOCKS > 1:
        tl.debug_barrier()
    for block in tl.static_range(BLOCKS):
        vs = block * BV + tl.arange(0, BV)
        if BLOCKS > 1:
            out, weight = vector(raw + (row * H + h) * V, vs, V), vector(norm, vs, V)
            if GATE != "none":
                gate = output_gate(token + at_gate, gate_up, gate_bias, h, vs, V, GATE_RANK, BGATE)
        result = out * tl.rsqrt(squares / V + norm_eps) * weight
        if GATE == "silu":
            result *= gate * tl.sigmoid(gate)
        if GATE == "sigmoid":
            result *= tl.sigmoid(gate)
        tl.store(y + (row * H + h) * V + vs, result.to(y.dtype.element_ty), mask=vs < V)


class Places(NamedTuple):
    """Where the other projections begin in a row of `given`, after q̃, k̃ and v."""

    beta: int
    decay: int
    gate: int
    low: int


def delta_token(
    given: Tensor, places: Places, plan: DeltaWeights, unit_eps: float, state: Tensor, new_state: Tensor
) -> Tensor:
    """y `[rows, H·V]`, before the output projection. Writes `new_state`, which may be `state`. All tensors are contiguous."""
    rows, (H, K, V) = given.shape[0], plan[:3]
    y = given.new_empty(rows, H * V)
    BK, width = tile_width(K), tile_width(V)
    BV = min(width, max(16, ELEMENTS // BK, width // MOST_BLOCKS))
    raw = None if BV >= V else y.new_empty(y.shape, dtype=torch.float32)
    writes, decay = plan.writes, plan.decay
    ups: list[Tensor | None] = [None] * 3
    if writes is not None:
        ups = [None if m is None else m.up for m in (writes.key, writes.gain, writes.expected)]
    R = next((up.shape[1] for up in ups if up is not None), 1)
    decay_up = plan.decay_in.up if isinstance(plan.decay_in, tuple) else None  # of a low-rank map
    gate_up, gate_bias = plan.gate[1:] if isinstance(plan.gate, tuple) else (None, None)
    ranks = [1 if up is None else up.shape[1] for up in (decay_up, gate_up)]
    with device_guard(given):
        delta_token_kernel[(rows * H,)](
            given, *ups, None if writes is None else writes.scale, *((None, None) if decay is None else decay[:2]),
            decay_up, gate_up, gate_bias, plan.norm.weight, state, new_state, raw, y,
            K**-0.5, plan.beta_scale, unit_eps, plan.norm.eps, H, given.shape[1], *places,
            SUBSTEPS=plan.substeps, N=0 if writes is None else writes.scale.shape[0], R=R, K=K, V=V,
            BR=tile_width(R), BK=BK, BV=BV, RANK=ranks[0], GATE_RANK=ranks[1],
            BRANK=tile_width(ranks[0]), BGATE=tile_width(ranks[1]),
            BOUND=0.0 if decay is None or decay.bound is None else decay.bound,
            GATE="none" if plan.gate is None else plan.gate_by,
            GELU=writes is not None and writes.solver == "gelu", NONLINEAR=writes is None or writes.nonlinearity,
            num_warps=_warps(BK * BV),
        )  # fmt: skip
    return y


def _warps(elements: int) -> int:
    """Warps of a program, by the elements of the state that it holds."""
    return 4 if elements < 16384 else 8 if elements < 32768 else 16
