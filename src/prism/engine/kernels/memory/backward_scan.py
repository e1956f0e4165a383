"""Backward kernels over the chunks: the state's gradient from the last chunk to the first, and the gates' gradient.

**Scan** (serial, the state's gradient in registers):

    dY_0 = N_0ᵀ dO + (X_0 ⊙ e^{G_C - G}) dS'        dU = T⁻ᵀ dY_0, the gradient of W_0        dR = -β ⊙ dU
    dS   = e^{G_C} dS' + (Q ⊙ e^G)ᵀ dO + (B ⊙ e^G)ᵀ dR

dU is itself a result (the gradient of the first write). The passes over tokens need only dU, and dS' every SAVED chunks. As
in `forward.py`, everything with value channels is held transposed.

**Decay** (the last pass): from the partial sums of all kernels to the gradient of each token's log-decay. Since
G_i = Σ_{t ≤ i} g_t, dg_t collects dG_i of all rows i ≥ t of its chunk. Terms with the factor e^{G_C - G_j} also decay at
every row t > j, and the decay of the incoming state involves all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.tiles import (
    UNROLLED,
    borders,
    lasting_chunks,
    load_gate,
    load_rows,
    load_tokens,
    store_rows,
)


# Repeats the argument list of `forward_scan_kernel`: a Triton kernel takes no structures.
@triton.jit(do_not_specialize=["T", "H", "padded", "per_segment", "segments"])
def backward_scan_kernel(
    q,
    x,
    erase_key,
    strengths,
    cumulated,
    documents,
    first,
    inverse,
    reach,
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
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    FINAL: tl.constexpr,
    SAVED: tl.constexpr,
    BOUND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_final`, `d_initial` `[segments, B, H, K, V]`; `d_states` `[B, H, padded / (SAVED · C), V, K]` holds dS'."""
    BLOCKS: tl.constexpr = V // BV
    pid = tl.program_id(0)
    first_column = (pid % BLOCKS) * BV
    segment = (pid // BLOCKS) % segments
    bh = pid // (BLOCKS * segments)
    b, h = bh // H, bh % H
    group = h // GROUP
    heads = tl.num_programs(0) // (BLOCKS * segments)
    chunks = padded // C
    matrix = (segment * heads + bh) * K

    dS = tl.zeros((BV, K), tl.float32)
    if FINAL:
        dS = tl.trans(d_final.load([matrix, first_column]))

    begin = segment * per_segment
    end = tl.minimum(chunks, begin + per_segment)
    if BOUND:  # later reads see nothing of the state with which the segment began, and no segment precedes the first
        lasting = lasting_chunks(reach + bh.to(tl.int64) * chunks, begin, end - begin, 1)
        end = tl.where(segment == 0, begin, tl.minimum(end, begin + lasting))
    for back in range(0, end - begin):
        n = end - 1 - back
        t = n * C
        chunk = bh * chunks + n
        from_start, to_end, carried = borders(
            cumulated, documents, bh, b, t, padded, T, C, C, DECAY, DOCUMENTS, SUBSTEPS
        )
        outgoing = dS.to(x.dtype)
        if SAVED:  # noqa: SIM102 (the outer condition is a compile-time constant)
            if n % SAVED == SAVED - 1:
                d_states.store([chunk // SAVED * V + first_column, 0], outgoing)
        asked = load_tokens(q, b, t, group * K, T, H // GROUP * K, C, K, SUBSTEPS)
        answered = tl.trans(load_tokens(d_o, b, t, h * V + first_column, T, H * V, C, BV, SUBSTEPS))
        left = (answered.to(tl.float32) * from_start[None, :]).to(x.dtype)
        dS = tl.dot(left, asked, dS * carried, input_precision=PRECISION)
        if ERASE:
            key = load_rows(x, b, t, group * (J * K), C, K)
            lookup = key if TIED else load_rows(erase_key, b, t, group * K, C, K)
            gram = first.load([chunk * C, 0])
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


@triton.jit(do_not_specialize=["T", "H", "padded", "heads"])
def backward_decay_kernel(
    cumulated,
    documents,
    d_cumulated,
    tails,
    touched,
    d_log_decay,
    T,
    H,
    padded,
    heads,
    J: tl.constexpr,
    SLABS: tl.constexpr,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SUBSTEPS: tl.constexpr,
):
    """One program per chunk and head. Partial sums, added in a fixed order: `d_cumulated` `[SLABS, K/BK, B, H, padded]` (of
    queries, of the erase if there is one, of columns), `tails` `[J, K/BK, B, H, padded]`, `touched` `[K/BK, B, H, chunks]`."""
    chunks = padded // C
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h, t = bh // H, bh % H, n * C
    i = tl.arange(0, C)
    _, _, carried = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, True, DOCUMENTS, SUBSTEPS)
    rows = tl.zeros((C,), tl.float32)
    tail = tl.zeros((C,), tl.float32)
    whole = 0.0
    if J <= UNROLLED:
        for s in tl.static_range(SLABS * BLOCKS):
            rows += tl.load(d_cumulated + (s * heads + bh).to(tl.int64) * padded + t + i)
        for s in tl.static_range(J * BLOCKS):
            tail += tl.load(tails + (s * heads + bh).to(tl.int64) * padded + t + i)
    else:
        for s in range(SLABS * BLOCKS):
            rows += tl.load(d_cumulated + (s * heads + bh).to(tl.int64) * padded + t + i)
        for s in range(J * BLOCKS):
            tail += tl.load(tails + (s * heads + bh).to(tl.int64) * padded + t + i)
    for s in tl.static_range(BLOCKS):
        whole += tl.load(touched + (s * heads + bh) * chunks + n)
    dg = tl.cumsum(rows, 0, reverse=True) + tl.cumsum(tail, 0) - tail + whole * carried
    if SUBSTEPS == 1:
        tl.store(d_log_decay + (b.to(tl.int64) * T + t + i) * H + h, dg, mask=t + i < T)
    else:
        token = b.to(tl.int64) * (T // SUBSTEPS) + (t + i) // SUBSTEPS
        tl.store(d_log_decay + token * H + h, dg, mask=(t + i < T) & ((t + i) % SUBSTEPS == 0))
