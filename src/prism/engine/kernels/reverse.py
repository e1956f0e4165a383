"""Backward, the serial half: the gradient of the state from the last chunk to the first, in registers.

    dY_0 = N_0ᵀ dO + (X_0 ⊙ e^{G_C - G}) dS'        dU = T⁻ᵀ dY_0, the gradient of W_0        dR = -β ⊙ dU
    dS   = e^{G_C} dS' + (Q ⊙ e^G)ᵀ dO + (B ⊙ e^G)ᵀ dR

dU is itself a result (the gradient of the first write); it and dS' every SAVED chunks are all that the parallel half needs.
As in `scan.py`, everything that has a value column is held turned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, load_gate, load_rows, store_rows


@triton.jit(do_not_specialize=["T", "H", "padded", "per_segment", "segments"])
def reverse_kernel(
    q,
    x,
    erase_key,
    strengths,
    cumulated,
    documents,
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
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    FINAL: tl.constexpr,
    SAVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_final`, `d_initial` `[segments, B, H, K, V]`; `d_states` `[B, H, padded / (SAVED · C), V, K]` holds dS'."""
    BLOCKS: tl.constexpr = V // BV
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
        from_start, to_end, carried = borders(cumulated, documents, bh, b, t, padded, T, C, C, DECAY, DOCUMENTS)
        outgoing = dS.to(x.dtype)
        if SAVED:  # noqa: SIM102 (one is known when compiling, the other is not)
            if n % SAVED == SAVED - 1:
                d_states.store([chunk // SAVED * V + first_column, 0], outgoing)
        asked = load_rows(q, b, t, h * K, C, K)
        answered = tl.trans(load_rows(d_o, b, t, h * V + first_column, C, BV))
        left = (answered.to(tl.float32) * from_start[None, :]).to(x.dtype)
        dS = tl.dot(left, asked, dS * carried, input_precision=PRECISION)
        if ERASE:
            key = load_rows(x, b, t, h * (J * K), C, K)
            lookup = key if TIED else load_rows(erase_key, b, t, h * K, C, K)
            gram = grams.load([chunk * (2 * J) * C, 0])
            written = tl.dot(outgoing, tl.trans(key), input_precision=PRECISION) * to_end[None, :]
            written = tl.dot(answered, tl.trans(gram), written, input_precision=PRECISION)
            solve = inverse.load([chunk * C, 0])
            wanted = tl.dot(written.to(x.dtype), solve, input_precision=PRECISION)
            if STRENGTH:
                from_start *= load_gate(strengths, bh, t, padded, C)
            seen = (wanted * -from_start[None, :]).to(x.dtype)
            dS = tl.dot(seen, lookup, dS, input_precision=PRECISION)
            if SAVED:
                store_rows(d_w, b, t, h * (J * V) + first_column, tl.trans(wanted), C, BV)

    d_initial.store([matrix, first_column], tl.trans(dS))
