"""Forward: the chunks of a sequence one after the other, the state `[K, BV]` in registers, outputs on the way.

One program runs one segment of one head and BV value columns. What does not depend on the order (T⁻¹) is ready; what
depends on it is computed here and never leaves the chip, except the outputs and, for training, each chunk's incoming state
and Y_0. With `MAP` the same code carries the columns of the identity instead of a state and writes nothing: after a segment
it holds the matrix by which the segment multiplies whatever enters it, so that segments can run side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import (
    borders,
    kept,
    live_rows,
    load_state,
    load_tile,
    off_diagonal,
    store_state,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "H", "chunks", "per_segment", "segments"])
def scan_kernel(
    q,
    x,
    w,
    erase_key,
    strength,
    cumulated,
    documents,
    mask,
    inverse,
    initial,
    o,
    states,
    fed,
    final,
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
    INITIAL: tl.constexpr,
    MAP: tl.constexpr,
    READ: tl.constexpr,
    SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BK ≥ K holds all key channels. `initial`, `final` `[segments, B, H, K, V]`; `states` `[B, H, chunks, K, V]`;
    `fed` (Y_0) `[B, T, H, V]`."""
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

    S = tl.zeros((BK, BV), tl.float32)
    if MAP:
        S = tl.where(ks[:, None] == vs[None, :], 1.0, 0.0)
    if INITIAL:
        S = load_state(initial + own, ks, vs, K, V).to(tl.float32)

    for n in range(segment * per_segment, tl.minimum(chunks, (segment + 1) * per_segment)):
        live = live_rows(mask, b, n * C + i, T, MASKED)
        row = b.to(tl.int64) * T + n * C
        token = row * H + h
        from_start, to_end, carried = borders(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS)
        incoming = S.to(dtype)
        if SAVE:
            store_state(states + (bh.to(tl.int64) * chunks + n) * (K * V), ks, vs, incoming, K, V)
        S = S * carried
        if not MAP:
            weights = kept(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS, False)
        if READ:
            asked = load_tile(q + token * K, i, ks, live, H * K, K, KEYS)
            out = tl.dot(asked, incoming, input_precision=PRECISION) * from_start[:, None]
        if ERASE:
            key = load_tile(x + token * (J * K), i, ks, live, H * (J * K), K, KEYS)
            lookup = key if TIED else load_tile(erase_key + token * K, i, ks, live, H * K, K, KEYS)
            seen = tl.dot(lookup, incoming, input_precision=PRECISION) * from_start[:, None]

        # Writes that no erase feeds: extra columns of the same products.
        if not MAP:
            for j in tl.static_range(1 if ERASE else 0, J):
                keys = load_tile(x + (token * J + j) * K, i, ks, live, H * (J * K), K, KEYS)
                values = load_tile(w + (token * J + j) * V, i, vs, live, H * (J * V), V, VALUES)
                if ERASE:
                    gram = off_diagonal(tl.dot(lookup, tl.trans(keys), input_precision=PRECISION) * weights, C)
                    seen = tl.dot(gram.to(dtype), values, seen, input_precision=PRECISION)
                if READ:
                    gram = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * weights
                    out = tl.dot(gram.to(dtype), values, out, input_precision=PRECISION)
                left = (values.to(tl.float32) * to_end[:, None]).to(dtype)
                S = tl.dot(tl.trans(keys), left, S, input_precision=PRECISION)

        if ERASE:
            if STRENGTH:
                seen *= tl.load(strength + (row + i) * H + h, mask=live, other=0.0).to(tl.float32)[:, None]
            if MAP:
                wanted = -seen
            else:
                wanted = load_tile(w + token * (J * V), i, vs, live, H * (J * V), V, VALUES).to(tl.float32) - seen
            solve = tl.load(inverse + (bh.to(tl.int64) * chunks + n) * (C * C) + i[:, None] * C + i[None, :])
            written = tl.dot(solve, wanted.to(dtype), input_precision=PRECISION)
            if READ:
                gram = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * weights
                out = tl.dot(gram.to(dtype), written.to(dtype), out, input_precision=PRECISION)
            if SAVE:
                store_tile(fed + token * V, i, vs, live, H * V, written, V, VALUES)
            left = (written * to_end[:, None]).to(dtype)
            S = tl.dot(tl.trans(key), left, S, input_precision=PRECISION)
        if READ:
            store_tile(o + token * V, i, vs, n * C + i < T, H * V, out, V, VALUES)

    store_state(final + own, ks, vs, S, K, V)
