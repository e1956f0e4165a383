"""Forward: the chunks of a sequence one after the other, the state in registers, outputs on the way.

One program runs one segment of one head and BV value columns. What does not depend on the order is ready (`prepare.py`);
what depends on it is computed here and never leaves the chip, except the outputs and, for training, the state every SAVED
chunks and Y_0. With `MAP` the same code carries the columns of the identity instead of a state and writes nothing: after a
segment it holds the matrix by which the segment multiplies whatever enters it, so that segments can run side by side.

Everything that has a value column is held turned (Sᵀ `[BV, K]`, Oᵀ and Yᵀ `[BV, C]`): then each product's left factor is
already in registers, its right factor is a tile as it was loaded, and a chunk may be shorter than a tensor core's 64 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, load_gate, load_rows, store_rows


@triton.jit(do_not_specialize=["T", "H", "padded", "per_segment", "segments"])
def scan_kernel(
    q,
    x,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
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
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    INITIAL: tl.constexpr,
    MAP: tl.constexpr,
    READ: tl.constexpr,
    SAVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`initial`, `final` `[segments, B, H, K, V]`; `states` `[B, H, padded / (SAVED · C), V, K]`; `fed` (Y_0)
    `[B, T, H, V]`. `per_segment` chunks are a multiple of SAVED; SAVED = 0 saves nothing."""
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
        from_start, to_end, carried = borders(cumulated, documents, bh, b, t, padded, T, C, C, DECAY, DOCUMENTS)
        incoming = S.to(x.dtype)
        if SAVED:  # noqa: SIM102 (one is known when compiling, the other is not)
            if n % SAVED == 0:
                states.store([chunk // SAVED * V + first_column, 0], incoming)
        S = S * carried
        if READ:
            asked = load_rows(q, b, t, h * K, C, K)
            out = tl.dot(incoming, tl.trans(asked), input_precision=PRECISION) * from_start[None, :]
        if ERASE:
            key = load_rows(x, b, t, h * (J * K), C, K)
            lookup = key if TIED else load_rows(erase_key, b, t, h * K, C, K)
            if STRENGTH:
                from_start *= load_gate(strengths, bh, t, padded, C)
            wanted = tl.dot(incoming, tl.trans(lookup), input_precision=PRECISION) * -from_start[None, :]

        # Writes that no erase feeds: extra columns of the same products.
        if not MAP:
            for j in tl.static_range(1 if ERASE else 0, J):
                keys = load_rows(x, b, t, (h * J + j) * K, C, K)
                values = tl.trans(load_rows(w, b, t, (h * J + j) * V + first_column, C, BV))
                if ERASE:
                    seen = grams.load([(chunk * GRAMS + J + j) * C, 0])
                    wanted = tl.dot(values, seen, wanted, input_precision=PRECISION)
                if READ:
                    out = tl.dot(values, grams.load([(chunk * GRAMS + j) * C, 0]), out, input_precision=PRECISION)
                left = (values.to(tl.float32) * to_end[None, :]).to(x.dtype)
                S = tl.dot(left, keys, S, input_precision=PRECISION)

        if ERASE:
            if not MAP:
                wanted += tl.trans(load_rows(w, b, t, h * (J * V) + first_column, C, BV)).to(tl.float32)
            solve = inverse.load([chunk * C, 0])
            written = tl.dot(wanted.to(x.dtype), tl.trans(solve), input_precision=PRECISION)
            S = tl.dot((written * to_end[None, :]).to(x.dtype), key, S, input_precision=PRECISION)
            if READ:
                gram = grams.load([chunk * GRAMS * C, 0])
                out = tl.dot(written.to(x.dtype), gram, out, input_precision=PRECISION)
            if SAVED:
                store_rows(fed, b, t, h * V + first_column, tl.trans(written), C, BV)
        if READ:
            store_rows(o, b, t, h * V + first_column, tl.trans(out), C, BV)

    final.store([matrix, first_column], tl.trans(S))
