"""Carry the state of a memory with a decay per key channel from chunk to chunk, forward and backward.

`channel_prepare.py` has put every gate into the tables, so these scans are those of `forward.py` and `backward_scan.py`
without gates, and one vector by which the state decays over a chunk:

    Y_0 = T⁻¹ (W_0 + b̃ S - β ⊙ Σ_{j>0} M_j W_j)        O = q̃ S + Σ_j N_j Y_j        S' = e^{G_C} ⊙ S + Σ_j x̃_jᵀ Y_j

    dY_j = N_jᵀ dO + x̃_j dS'        dU = T⁻ᵀ dY_0 = dW_0        dW_j = dY_j - (β ⊙ M_j)ᵀ dU   (j > 0)
    dS   = e^{G_C} ⊙ dS' + q̃ᵀ dO + b̃ᵀ dU

As there, the state stays in registers, and everything with value channels is held transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.tiles import load_rows, store_rows


@triton.jit(do_not_specialize=["T", "H", "padded", "per_segment", "segments"])
def channel_forward_scan_kernel(
    w,
    asked,
    lookups,
    keys,
    carried,
    grams,
    inverse,
    initial,
    o,
    states,
    fed,
    final,
    T,
    H,
    padded,
    per_segment,
    segments,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    ERASE: tl.constexpr,
    INITIAL: tl.constexpr,
    MAP: tl.constexpr,
    READ: tl.constexpr,
    SAVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`initial`, `final` `[segments, B, H, K, V]`; `states` `[B, H, chunks, V, K]`; `fed` (Y_0) `[B, T, H, V]`. MAP carries
    the columns of the identity instead of a state, for the segment's map."""
    BLOCKS: tl.constexpr = V // BV
    GRAMS: tl.constexpr = 2 * J if ERASE else J
    pid = tl.program_id(0)
    first_column = (pid % BLOCKS) * BV
    segment = (pid // BLOCKS) % segments
    bh = pid // (BLOCKS * segments)
    b, h = bh // H, bh % H
    heads = tl.num_programs(0) // (BLOCKS * segments)
    chunks = padded // C
    matrix = (segment * heads + bh) * K

    S = tl.zeros((BV, K), tl.float32)
    if MAP:
        S = tl.where(tl.arange(0, K)[None, :] == first_column + tl.arange(0, BV)[:, None], 1.0, 0.0)
    if INITIAL:
        S = tl.trans(initial.load([matrix, first_column]))

    for n in range(segment * per_segment, tl.minimum(chunks, (segment + 1) * per_segment)):
        t = n * C
        chunk = bh * chunks + n
        incoming = S.to(keys.dtype)
        if SAVED:
            states.store([chunk * V + first_column, 0], incoming)
        S = S * tl.load(carried + chunk.to(tl.int64) * K + tl.arange(0, K))[None, :]
        if READ:
            out = tl.dot(incoming, tl.trans(asked.load([chunk * C, 0])), input_precision=PRECISION)
        if ERASE:
            wanted = tl.dot(incoming, tl.trans(lookups.load([chunk * C, 0])), input_precision=PRECISION)
        if not MAP:
            for j in tl.static_range(1 if ERASE else 0, J):
                values = tl.trans(load_rows(w, b, t, (h * J + j) * V + first_column, C, BV))
                if ERASE:
                    seen = tl.trans(grams.load([(chunk * GRAMS + J + j) * C, 0]))
                    wanted = tl.dot(values, seen, wanted, input_precision=PRECISION)
                if READ:
                    seen = tl.trans(grams.load([(chunk * GRAMS + j) * C, 0]))
                    out = tl.dot(values, seen, out, input_precision=PRECISION)
                S = tl.dot(values, keys.load([(chunk * J + j) * C, 0]), S, input_precision=PRECISION)
        if ERASE:
            if not MAP:
                wanted += tl.trans(load_rows(w, b, t, h * (J * V) + first_column, C, BV)).to(tl.float32)
            solve = tl.trans(inverse.load([chunk * C, 0]))
            written = tl.dot(wanted.to(keys.dtype), solve, input_precision=PRECISION).to(keys.dtype)
            S = tl.dot(written, keys.load([chunk * J * C, 0]), S, input_precision=PRECISION)
            if READ:
                seen = tl.trans(grams.load([chunk * GRAMS * C, 0]))
                out = tl.dot(written, seen, out, input_precision=PRECISION)
            if SAVED:
                store_rows(fed, b, t, h * V + first_column, tl.trans(written), C, BV)
        if READ:
            store_rows(o, b, t, h * V + first_column, tl.trans(out), C, BV)

    final.store([matrix, first_column], tl.trans(S))


@triton.jit(do_not_specialize=["T", "H", "padded", "per_segment", "segments"])
def channel_backward_scan_kernel(
    asked,
    lookups,
    keys,
    carried,
    grams,
    inverse,
    d_o,
    d_final,
    d_states,
    d_w,
    d_initial,
    T,
    H,
    padded,
    per_segment,
    segments,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    ERASE: tl.constexpr,
    FINAL: tl.constexpr,
    SAVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_final`, `d_initial` `[segments, B, H, K, V]`; `d_states` (dS') `[B, H, chunks, V, K]`; `d_w` `[B, T, H, J, V]`."""
    BLOCKS: tl.constexpr = V // BV
    GRAMS: tl.constexpr = 2 * J if ERASE else J
    pid = tl.program_id(0)
    first_column = (pid % BLOCKS) * BV
    segment = (pid // BLOCKS) % segments
    bh = pid // (BLOCKS * segments)
    b, h = bh // H, bh % H
    heads = tl.num_programs(0) // (BLOCKS * segments)
    chunks = padded // C
    matrix = (segment * heads + bh) * K

    dS = tl.zeros((BV, K), tl.float32)
    if FINAL:
        dS = tl.trans(d_final.load([matrix, first_column]))

    begin = segment * per_segment
    end = tl.minimum(chunks, begin + per_segment)
    for back in range(0, end - begin):
        n = end - 1 - back
        t = n * C
        chunk = bh * chunks + n
        outgoing = dS.to(keys.dtype)
        if SAVED:
            d_states.store([chunk * V + first_column, 0], outgoing)
        answered = tl.trans(load_rows(d_o, b, t, h * V + first_column, C, BV))
        dS = dS * tl.load(carried + chunk.to(tl.int64) * K + tl.arange(0, K))[None, :]
        dS = tl.dot(answered, asked.load([chunk * C, 0]), dS, input_precision=PRECISION)
        if ERASE:
            written = tl.dot(outgoing, tl.trans(keys.load([chunk * J * C, 0])), input_precision=PRECISION)
            written = tl.dot(answered, grams.load([chunk * GRAMS * C, 0]), written, input_precision=PRECISION)
            solve = inverse.load([chunk * C, 0])
            wanted = tl.dot(written.to(keys.dtype), solve, input_precision=PRECISION).to(keys.dtype)
            dS = tl.dot(wanted, lookups.load([chunk * C, 0]), dS, input_precision=PRECISION)
            if SAVED:
                store_rows(d_w, b, t, h * (J * V) + first_column, tl.trans(wanted), C, BV)
        if SAVED:
            for j in tl.static_range(1 if ERASE else 0, J):
                key = tl.trans(keys.load([(chunk * J + j) * C, 0]))
                written = tl.dot(outgoing, key, input_precision=PRECISION)
                written = tl.dot(answered, grams.load([(chunk * GRAMS + j) * C, 0]), written, input_precision=PRECISION)
                if ERASE:
                    seen = grams.load([(chunk * GRAMS + J + j) * C, 0])
                    written = tl.dot(wanted, seen, written, input_precision=PRECISION)
                store_rows(d_w, b, t, (h * J + j) * V + first_column, tl.trans(written), C, BV)

    d_initial.store([matrix, first_column], tl.trans(dS))
