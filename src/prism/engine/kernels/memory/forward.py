"""Forward kernels of the chunk memory: prepare all chunks in parallel, then carry the state from chunk to chunk.

**Prepare** (parallel): what depends on the inputs only, which is the cumulative gates, T⁻¹, and how much each row sees of
each column's write. These are C × C matrices of short chunks, a few dozen bytes per token; everything larger is cheaper to
recompute than to send through memory. T⁻¹ is computed by forward substitution: row by row inside blocks of 8 rows, then
one block row after the other as matrix products. (An inverse by repeated squaring over the chunk is wrong by orders of
magnitude when keys are correlated.)

**Scan** (serial over chunks): the state stays in registers, and each chunk writes its outputs. One program runs one
segment of one head and BV value channels. Only the outputs leave the chip and, for training, the state every SAVED
chunks and Y_0. With `MAP` the same code carries the columns of the identity instead of a state and writes nothing: at the
end of a segment it holds the matrix by which the segment multiplies its incoming state, so that segments can run in parallel.

In the scan, everything with value channels is held transposed (Sᵀ `[BV, K]`, Oᵀ and Yᵀ `[BV, C]`): each product's left
factor is then already in registers, its right factor is a tile in the layout in which it was loaded, and a chunk may be
shorter than the 64 rows of a tensor core.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.tiles import (
    UNROLLED,
    borders,
    diagonal,
    lasting_chunks,
    left_of_writes,
    load_gate,
    load_rows,
    load_tokens,
    log_growth,
    off_diagonal,
    store_reach,
    store_rows,
    store_tokens,
)

ROWS = tl.constexpr(8)
"""Rows of the blocks of T⁻¹ that are solved row by row: half as many take half as many steps on half the numbers."""


@triton.jit(do_not_specialize=["T", "H", "padded"])
def prepare_kernel(
    q,
    x,
    erase_key,
    log_decay,
    strength,
    documents,
    cumulated,
    strengths,
    first,
    grams,
    inverse,
    reach,
    T,
    H,
    padded,
    J: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    BOUND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per chunk and head. Gates `[B, T, H]` become `[B, H, padded]`: G_i = Σ_{j ≤ i} g_j inside each chunk, summed
    in float64, in base 2; and β. `inverse` `[B, H, chunks, C, C]` is T⁻¹, and `first` has N_0ᵀ. `grams`
    `[B, H, chunks, 2J - 2, C, C]` has N_jᵀ = X_j Qᵀ ⊙ Γᵀ, then -β ⊙ M_jᵀ = -β ⊙ X_j Bᵀ ⊙ Γᵀ (strict), for j > 0. Without
    an erase it is `[…, J, C, C]`, N_jᵀ of all columns. BOUND: `reach` `[B, H, chunks]`, as in `tiles.py`."""
    chunks = padded // C
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = bh // H, bh % H
    group = h // GROUP
    t = n * C
    i = tl.arange(0, C)
    given = (b.to(tl.int64) * T + t + i) * H + h
    G = tl.zeros((C,), tl.float32)
    if DECAY:
        if SUBSTEPS == 1:
            g = tl.load(log_decay + given, mask=t + i < T, other=0.0)
        else:
            gate = (b.to(tl.int64) * (T // SUBSTEPS) + (t + i) // SUBSTEPS) * H + h
            g = tl.load(log_decay + gate, mask=(t + i < T) & ((t + i) % SUBSTEPS == 0), other=0.0)
        # e^-128 is already 0 in float32. In a sum, a stronger decay would take all digits from the gates of nearby tokens.
        g = tl.where(g < -128.0, -128.0, g).to(tl.float64)
        G = (tl.cumsum(g, 0) * 1.4426950408889634).to(cumulated.dtype.element_ty)
        tl.store(cumulated + bh.to(tl.int64) * padded + t + i, G)
    FED: tl.constexpr = 1 if ERASE else 0
    LATER: tl.constexpr = J - FED
    place = (bh * chunks + n) * LATER * (1 + FED)
    turned = left_of_writes(G, documents, b, t, T, C, DECAY, DOCUMENTS, True, SUBSTEPS)
    asked = load_tokens(q, b, t, group * K, T, H // GROUP * K, C, K, SUBSTEPS)
    lookup = asked
    beta = tl.full((C,), 1.0, tl.float32)
    if ERASE:
        if STRENGTH:
            beta = tl.load(strength + given, mask=t + i < T, other=0.0)
            tl.store(strengths + bh.to(tl.int64) * padded + t + i, beta)
        key = load_rows(x, b, t, group * (J * K), C, K)
        lookup = key if TIED else load_rows(erase_key, b, t, group * K, C, K)
        gram = tl.dot(key, tl.trans(asked), input_precision=PRECISION)
        first.store([(bh * chunks + n) * C, 0], (gram * turned).to(first.dtype))
        upper = tl.dot(key, tl.trans(lookup), input_precision=PRECISION)
        if BOUND:
            growth = tl.sum(log_growth(beta * diagonal(upper, C), key, lookup, beta, TIED), 0)
            store_reach(reach, G, growth, documents, bh * chunks + n, b, t, T, C, DECAY, DOCUMENTS, SUBSTEPS)
        solved = invert_unit_lower(off_diagonal(upper * turned * beta[None, :], C), C, PRECISION)
        inverse.store([(bh * chunks + n) * C, 0], solved.to(inverse.dtype))
    elif BOUND:
        store_reach(reach, G, 0.0, documents, bh * chunks + n, b, t, T, C, DECAY, DOCUMENTS, SUBSTEPS)
    if J <= UNROLLED:
        for j in tl.static_range(LATER):
            column_grams(
                x, grams, asked, lookup, turned, beta, b, group, t, place, j, J, K, C, FED, LATER, ERASE, PRECISION
            )
    else:
        for j in range(LATER):
            column_grams(
                x, grams, asked, lookup, turned, beta, b, group, t, place, j, J, K, C, FED, LATER, ERASE, PRECISION
            )


@triton.jit
def column_grams(
    x,
    grams,
    asked,
    lookup,
    turned,
    beta,
    b,
    group,
    t,
    place,
    j,
    J: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    FED: tl.constexpr,
    LATER: tl.constexpr,
    ERASE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store what queries and erases see of a column that no erase feeds."""
    keys = load_rows(x, b, t, (group * J + FED + j) * K, C, K)
    gram = tl.dot(keys, tl.trans(asked), input_precision=PRECISION)
    grams.store([(place + j) * C, 0], (gram * turned).to(grams.dtype))
    if ERASE:
        gram = tl.dot(keys, tl.trans(lookup), input_precision=PRECISION)
        seen = off_diagonal(gram * turned * -beta[None, :], C)
        grams.store([(place + LATER + j) * C, 0], seen.to(grams.dtype))


@triton.jit
def invert_unit_lower(upper, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + upperᵀ)⁻¹ for a strictly upper triangular `[C, C]`."""
    R: tl.constexpr = ROWS
    BLOCKS: tl.constexpr = C // R
    # The diagonal blocks [BLOCKS, R, R], all inverted together. Transposed, a row's coefficients lie along the rows that they
    # multiply.
    block_row = tl.arange(0, BLOCKS)[:, None, None, None]
    block_column = tl.arange(0, BLOCKS)[None, None, :, None]
    tiles = tl.reshape(upper, (BLOCKS, R, BLOCKS, R))
    blocks = tl.sum(tl.where(block_row == block_column, tiles, 0.0), 2)
    r = tl.arange(0, R)
    unit = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0)
    solved = tl.zeros((BLOCKS, R, R), tl.float32) + unit
    for i in range(1, R):
        coefficients = tl.sum(tl.where(r[None, None, :] == i, blocks, 0.0), 2)  # row i of every block
        known = tl.sum(coefficients[:, :, None] * solved, 1)
        solved -= tl.where(r[None, :, None] == i, known[:, None, :], 0.0)
    diagonal = tl.reshape(tl.where(block_row == block_column, solved[:, :, None, :], 0.0), (C, C))
    below = tl.trans(tl.reshape(tl.where(block_row == block_column, 0.0, tiles), (C, C)))
    step = tl.dot(diagonal, below, input_precision=PRECISION)
    result = diagonal
    for _ in tl.static_range(1, BLOCKS):  # one more block row is exact after each
        result = diagonal - tl.dot(step, result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["T", "H", "padded", "per_segment", "segments"])
def forward_scan_kernel(
    q,
    x,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
    first,
    grams,
    inverse,
    reach,
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
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    INITIAL: tl.constexpr,
    MAP: tl.constexpr,
    READ: tl.constexpr,
    SAVED: tl.constexpr,
    BOUND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`initial`, `final` `[segments, B, H, K, V]`; `states` `[B, H, padded / (SAVED · C), V, K]`; `fed` (Y_0)
    `[B, T, H, V]`. `per_segment` chunks are a multiple of SAVED; SAVED = 0 saves nothing."""
    BLOCKS: tl.constexpr = V // BV
    FED: tl.constexpr = 1 if ERASE else 0
    LATER: tl.constexpr = J - FED
    pid = tl.program_id(0)
    first_column = (pid % BLOCKS) * BV
    segment = (pid // BLOCKS) % segments
    bh = pid // (BLOCKS * segments)
    b, h = bh // H, bh % H
    group = h // GROUP
    heads = tl.num_programs(0) // (BLOCKS * segments)
    chunks = padded // C
    matrix = (segment * heads + bh) * K

    S = tl.zeros((BV, K), tl.float32)
    if MAP:
        S = tl.where(tl.arange(0, K)[None, :] == first_column + tl.arange(0, BV)[:, None], 1.0, 0.0)
    if INITIAL:
        S = tl.trans(initial.load([matrix, first_column]))

    begin, end = segment * per_segment, tl.minimum(chunks, (segment + 1) * per_segment)
    if BOUND:
        lasting = lasting_chunks(reach + bh.to(tl.int64) * chunks, end - 1, end - begin, -1)
        if MAP:  # under a decay most maps are 0
            S = tl.where(lasting > end - begin, S, 0.0)
            begin = tl.where(lasting > end - begin, begin, end)
        else:  # nothing is left of earlier writes, and no segment follows the last
            begin = tl.where(segment == segments - 1, end, tl.maximum(begin, end - lasting))
    for n in range(begin, end):
        t = n * C
        chunk = bh * chunks + n
        from_start, to_end, carried = borders(
            cumulated, documents, bh, b, t, padded, T, C, C, DECAY, DOCUMENTS, SUBSTEPS
        )
        incoming = S.to(x.dtype)
        if SAVED:  # noqa: SIM102 (the outer condition is a compile-time constant)
            if n % SAVED == 0:
                states.store([chunk // SAVED * V + first_column, 0], incoming)
        S = S * carried
        out, wanted = S, S  # placeholders, where nothing is read or erased
        if READ:
            asked = load_tokens(q, b, t, group * K, T, H // GROUP * K, C, K, SUBSTEPS)
            out = tl.dot(incoming, tl.trans(asked), input_precision=PRECISION) * from_start[None, :]
        if ERASE:
            key = load_rows(x, b, t, group * (J * K), C, K)
            lookup = key if TIED else load_rows(erase_key, b, t, group * K, C, K)
            if STRENGTH:
                from_start *= load_gate(strengths, bh, t, padded, C)
            wanted = tl.dot(incoming, tl.trans(lookup), input_precision=PRECISION) * -from_start[None, :]

        # Writes that no erase feeds: extra columns of the same products.
        if not MAP:
            place = chunk * LATER * (1 + FED)
            if J <= UNROLLED:
                for j in tl.static_range(LATER):
                    S, out, wanted = add_column(
                        S, out, wanted, x, w, grams, to_end, b, h, group, t, place, first_column, j,
                        J, K, V, BV, C, FED, LATER, ERASE, READ, PRECISION,
                    )  # fmt: skip
            else:
                for j in range(LATER):
                    S, out, wanted = add_column(
                        S, out, wanted, x, w, grams, to_end, b, h, group, t, place, first_column, j,
                        J, K, V, BV, C, FED, LATER, ERASE, READ, PRECISION,
                    )  # fmt: skip

        if ERASE:
            if not MAP:
                wanted += tl.trans(load_rows(w, b, t, h * (J * V) + first_column, C, BV)).to(tl.float32)
            solve = inverse.load([chunk * C, 0])
            written = tl.dot(wanted.to(x.dtype), tl.trans(solve), input_precision=PRECISION)
            S = tl.dot((written * to_end[None, :]).to(x.dtype), key, S, input_precision=PRECISION)
            if READ:
                gram = first.load([chunk * C, 0])
                out = tl.dot(written.to(x.dtype), gram, out, input_precision=PRECISION)
            if SAVED:
                store_rows(fed, b, t, h * V + first_column, tl.trans(written), C, BV)
        if READ:
            store_tokens(o, b, t, h * V + first_column, tl.trans(out), T, H * V, C, BV, SUBSTEPS)

    final.store([matrix, first_column], tl.trans(S))


@triton.jit
def add_column(
    S,
    out,
    wanted,
    x,
    w,
    grams,
    to_end,
    b,
    h,
    group,
    t,
    place,
    first_column,
    j,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    FED: tl.constexpr,
    LATER: tl.constexpr,
    ERASE: tl.constexpr,
    READ: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add a column that no erase feeds to the state, to the outputs (READ) and to what the erase looks up (ERASE)."""
    keys = load_rows(x, b, t, (group * J + FED + j) * K, C, K)
    values = tl.trans(load_rows(w, b, t, (h * J + FED + j) * V + first_column, C, BV))
    if ERASE:
        seen = grams.load([(place + LATER + j) * C, 0])
        wanted = tl.dot(values, seen, wanted, input_precision=PRECISION)
    if READ:
        out = tl.dot(values, grams.load([(place + j) * C, 0]), out, input_precision=PRECISION)
    left = (values.to(tl.float32) * to_end[None, :]).to(x.dtype)
    return tl.dot(left, keys, S, input_precision=PRECISION), out, wanted
