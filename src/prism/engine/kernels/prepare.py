"""Per chunk: cumulated log-decays, and the inverse of T = I + β ⊙ tril(B X_0ᵀ ⊙ Γ, -1), the only triangular system.

T⁻¹ is C numbers a token, a sixth of what the keys and values of one write are; everything else the chunk form needs is
cheaper to compute again than to send through memory. Forward substitution throughout: inside blocks of 16 rows one row
after the other, then block row after block row as matrix products. (An inverse by repeated squaring over the chunk is
wrong by orders of magnitude when keys are correlated.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import kept, live_rows, load_tile, off_diagonal


@triton.jit(do_not_specialize=["T", "H", "chunks"])
def cumulate_kernel(log_decay, mask, cumulated, T, H, chunks, C: tl.constexpr, MASKED: tl.constexpr):
    """G_i = Σ_{j ≤ i} g_j inside each chunk, summed in float64, in base 2. One program a chunk and head."""
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = bh // H, bh % H
    i = tl.arange(0, C)
    t = n * C + i
    live = live_rows(mask, b, t, T, MASKED)
    g = tl.load(log_decay + (b.to(tl.int64) * T + t) * H + h, mask=live, other=0.0).to(tl.float64)
    G = tl.cumsum(g, 0) * 1.4426950408889634
    tl.store(cumulated + (bh.to(tl.int64) * chunks + n) * C + i, G.to(cumulated.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "H", "chunks"])
def inverse_kernel(
    x,
    erase_key,
    strength,
    cumulated,
    documents,
    mask,
    inverse,
    T,
    H,
    chunks,
    J: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """T⁻¹ of one chunk and head, `[B, H, chunks, C, C]`."""
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = bh // H, bh % H
    i = tl.arange(0, C)
    t = n * C + i
    live = live_rows(mask, b, t, T, MASKED)
    row = b.to(tl.int64) * T + n * C
    EXACT: tl.constexpr = K % BK == 0

    gram = tl.zeros((C, C), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        ks = k0 + tl.arange(0, BK)
        keys = load_tile(x + (row * H + h) * (J * K), i, ks, live, H * (J * K), K, EXACT)
        if TIED:
            gram = tl.dot(keys, tl.trans(keys), gram, input_precision=PRECISION)
        else:
            lookup = load_tile(erase_key + (row * H + h) * K, i, ks, live, H * K, K, EXACT)
            gram = tl.dot(lookup, tl.trans(keys), gram, input_precision=PRECISION)
    lower = off_diagonal(gram * kept(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS, False), C)
    if STRENGTH:
        beta = tl.load(strength + (row + i) * H + h, mask=live, other=0.0).to(tl.float32)
        lower *= beta[:, None]
    out = inverse + (bh.to(tl.int64) * chunks + n) * (C * C) + i[:, None] * C + i[None, :]
    tl.store(out, invert_unit_lower(lower, C, PRECISION).to(inverse.dtype.element_ty))


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
