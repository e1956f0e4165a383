"""Backward, the serial half: the gradient of the state from the last chunk to the first, `[K, BV]` in registers.

    dY_0 = tril(Q X_0ᵀ ⊙ Γ)ᵀ dO + (X_0 ⊙ e^{G_C - G}) dS'        dU = T⁻ᵀ dY_0, the gradient of W_0        dR = -β ⊙ dU
    dS   = e^{G_C} dS' + (Q ⊙ e^G)ᵀ dO + (B ⊙ e^G)ᵀ dR

dU is itself a result (the gradient of the first write); it and each chunk's dS' are all that `tokens.py` needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, kept, live_rows, load_state, load_tile, store_state, store_tile


@triton.jit(do_not_specialize=["T", "H", "chunks", "per_segment", "segments"])
def reverse_kernel(
    q,
    x,
    erase_key,
    strength,
    cumulated,
    documents,
    mask,
    inverse,
    d_o,
    d_final,
    d_states,
    d_w,
    d_initial,
    T,
    H,
    chunks,
    per_segment,
    segments,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    FINAL: tl.constexpr,
    SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`d_final`, `d_initial` `[segments, B, H, K, V]`; `d_states` `[B, H, chunks, K, V]` holds dS' of each chunk."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % BLOCKS
    segment = (pid // BLOCKS) % segments
    bh = pid // (BLOCKS * segments)
    b, h = bh // H, bh % H
    heads = tl.num_programs(0) // (BLOCKS * segments)

    i = tl.arange(0, C)
    ks = tl.arange(0, BK)
    vs = block * BV + tl.arange(0, BV)
    KEYS: tl.constexpr = K == BK
    VALUES: tl.constexpr = V % BV == 0
    dtype = x.dtype.element_ty
    own = (segment * heads + bh).to(tl.int64) * (K * V)

    dS = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        dS = load_state(d_final + own, ks, vs, K, V).to(tl.float32)

    begin = segment * per_segment
    end = tl.minimum(chunks, begin + per_segment)
    for back in range(0, end - begin):
        n = end - 1 - back
        live = live_rows(mask, b, n * C + i, T, MASKED)
        row = b.to(tl.int64) * T + n * C
        token = row * H + h
        from_start, to_end, carried = borders(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS)
        outgoing = dS.to(dtype)
        if SAVE:
            store_state(d_states + (bh.to(tl.int64) * chunks + n) * (K * V), ks, vs, outgoing, K, V)
        asked = load_tile(q + token * K, i, ks, live, H * K, K, KEYS)
        answered = load_tile(d_o + token * V, i, vs, live, H * V, V, VALUES)
        left = (answered.to(tl.float32) * from_start[:, None]).to(dtype)
        dS = tl.dot(tl.trans(asked), left, dS * carried, input_precision=PRECISION)
        if ERASE:
            key = load_tile(x + token * (J * K), i, ks, live, H * (J * K), K, KEYS)
            lookup = key if TIED else load_tile(erase_key + token * K, i, ks, live, H * K, K, KEYS)
            weights = kept(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS, True)
            gram = tl.dot(key, tl.trans(asked), input_precision=PRECISION) * weights
            written = tl.dot(key, outgoing, input_precision=PRECISION) * to_end[:, None]
            written = tl.dot(gram.to(dtype), answered, written, input_precision=PRECISION)
            solve = tl.load(inverse + (bh.to(tl.int64) * chunks + n) * (C * C) + i[:, None] * C + i[None, :])
            wanted = tl.dot(tl.trans(solve), written.to(dtype), input_precision=PRECISION)
            if SAVE:
                store_tile(d_w + token * (J * V), i, vs, n * C + i < T, H * (J * V), wanted, V, VALUES)
            if STRENGTH:
                wanted *= tl.load(strength + (row + i) * H + h, mask=live, other=0.0).to(tl.float32)[:, None]
            seen = (wanted * -from_start[:, None]).to(dtype)
            dS = tl.dot(tl.trans(lookup), seen, dS, input_precision=PRECISION)

    store_state(d_initial + own, ks, vs, dS, K, V)
