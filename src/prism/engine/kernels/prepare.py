"""Per chunk, what depends on the inputs alone: cumulated gates, T⁻¹, and how much each row sees of each column's write.

These are C × C matrices of short chunks, a few dozen bytes a token; everything larger is cheaper to compute again than to
send through memory. T⁻¹ is forward substitution throughout: inside blocks of 16 rows one row after the other, then block row
after block row as matrix products. (An inverse by repeated squaring over the chunk is wrong by orders of magnitude when
keys are correlated.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import left_of_writes, load_rows, off_diagonal


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
    grams,
    inverse,
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
    PRECISION: tl.constexpr,
):
    """One chunk and head. Gates `[B, T, H]` become `[B, H, padded]`: G_i = Σ_{j ≤ i} g_j inside each chunk, summed in
    float64, in base 2; and β. `inverse` `[B, H, chunks, C, C]` is T⁻¹; `grams` `[B, H, chunks, 2J or J, C, C]` holds
    N_jᵀ = X_j Qᵀ ⊙ Γᵀ for every column, then -β ⊙ M_jᵀ = -β ⊙ X_j Bᵀ ⊙ Γᵀ (strict)."""
    chunks = padded // C
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = bh // H, bh % H
    t = n * C
    i = tl.arange(0, C)
    given = (b.to(tl.int64) * T + t + i) * H + h
    G = tl.zeros((C,), tl.float32)
    if DECAY:
        g = tl.load(log_decay + given, mask=t + i < T, other=0.0)
        # e^-128 is 0 in float32 already; in a sum, anything larger would swallow the gates of the tokens around it.
        g = tl.where(g < -128.0, -128.0, g).to(tl.float64)
        G = (tl.cumsum(g, 0) * 1.4426950408889634).to(cumulated.dtype.element_ty)
        tl.store(cumulated + bh.to(tl.int64) * padded + t + i, G)
    GRAMS: tl.constexpr = 2 * J if ERASE else J
    place = (bh * chunks + n) * GRAMS
    if ERASE:
        key = load_rows(x, b, t, h * (J * K), C, K)
        lookup = key if TIED else load_rows(erase_key, b, t, h * K, C, K)
        lower = tl.dot(lookup, tl.trans(key), input_precision=PRECISION)
        lower *= left_of_writes(G, documents, b, t, T, C, DECAY, DOCUMENTS, False)
        beta = tl.full((C,), 1.0, tl.float32)
        if STRENGTH:
            beta = tl.load(strength + given, mask=t + i < T, other=0.0)
            tl.store(strengths + bh.to(tl.int64) * padded + t + i, beta)
        solved = invert_unit_lower(off_diagonal(lower * beta[:, None], C), C, PRECISION)
        inverse.store([(bh * chunks + n) * C, 0], solved.to(inverse.dtype))
    turned = left_of_writes(G, documents, b, t, T, C, DECAY, DOCUMENTS, True)
    asked = load_rows(q, b, t, h * K, C, K)
    for j in tl.static_range(J):
        keys = load_rows(x, b, t, (h * J + j) * K, C, K)
        gram = tl.dot(keys, tl.trans(asked), input_precision=PRECISION)
        grams.store([(place + j) * C, 0], (gram * turned).to(grams.dtype))
        if ERASE:
            gram = tl.dot(keys, tl.trans(lookup), input_precision=PRECISION)
            seen = off_diagonal(gram * turned * -beta[None, :], C)
            grams.store([(place + J + j) * C, 0], seen.to(grams.dtype))


@triton.jit
def invert_unit_lower(lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)⁻¹ for a strictly lower triangular `[C, C]`."""
    BLOCKS: tl.constexpr = C // 16
    # The diagonal blocks [BLOCKS, 16, 16], all inverted at once.
    block_row = tl.arange(0, BLOCKS)[:, None, None, None]
    block_column = tl.arange(0, BLOCKS)[None, None, :, None]
    tiles = tl.reshape(lower, (BLOCKS, 16, BLOCKS, 16))
    blocks = tl.sum(tl.where(block_row == block_column, tiles, 0.0), 2)
    r = tl.arange(0, 16)
    unit = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0)
    solved = tl.zeros((BLOCKS, 16, 16), tl.float32) + unit
    for i in range(1, 16):
        coefficients = tl.sum(tl.where(r[None, :, None] == i, blocks, 0.0), 1)  # row i of every block
        known = tl.sum(coefficients[:, :, None] * solved, 1)
        solved -= tl.where(r[None, :, None] == i, known[:, None, :], 0.0)
    if BLOCKS == 1:
        return tl.reshape(solved, (C, C))
    diagonal = tl.reshape(tl.where(block_row == block_column, solved[:, :, None, :], 0.0), (C, C))
    below = tl.reshape(tl.where(block_row == block_column, 0.0, tiles), (C, C))
    step = tl.dot(diagonal, below, input_precision=PRECISION)
    result = diagonal
    for _ in tl.static_range(1, BLOCKS):  # one more block row is exact after each
        result = diagonal - tl.dot(step, result, input_precision=PRECISION)
    return result
