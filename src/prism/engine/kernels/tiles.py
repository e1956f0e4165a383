"""What every chunk kernel does the same way: which rows are real, how tiles are loaded, what is left of a write.

Tensors are `[B, T, H, …]`, contiguous; a tile has C rows, one per token, `H · columns · width` elements apart. Offsets of a
whole chunk are 64-bit, those inside one are 32-bit. Cumulated log-decays are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def live_rows(mask, b, t, T, MASKED: tl.constexpr):
    """Rows that hold a token: inside the sequence and not padding."""
    live = t < T
    if MASKED:
        live = live & (tl.load(mask + b.to(tl.int64) * T + t, mask=live, other=0) != 0)
    return live


@triton.jit
def load_tile(base, rows, columns, live, stride, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """`[rows, columns]` at `base`; zero on dead rows and beyond `WIDTH` (EXACT: the columns never reach beyond it)."""
    pointers = base + rows[:, None] * stride + columns[None, :]
    if EXACT:
        return tl.load(pointers, mask=live[:, None], other=0.0)
    return tl.load(pointers, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(base, rows, columns, live, stride, tile, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    pointers = base + rows[:, None] * stride + columns[None, :]
    keep = live[:, None] if EXACT else live[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=keep)


@triton.jit
def load_state(base, ks, vs, K: tl.constexpr, V: tl.constexpr):
    return tl.load(base + ks[:, None] * V + vs[None, :], mask=(ks < K)[:, None] & (vs < V)[None, :], other=0.0)


@triton.jit
def store_state(base, ks, vs, tile, K: tl.constexpr, V: tl.constexpr):
    pointers = base + ks[:, None] * V + vs[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(ks < K)[:, None] & (vs < V)[None, :])


@triton.jit
def borders(cumulated, documents, bh, b, n, chunks, T, C: tl.constexpr, DECAY: tl.constexpr, DOCUMENTS: tl.constexpr):
    """What chunk n keeps: of the incoming state at each row `[C]`, of each row's write at the end `[C]`, of the state."""
    i = tl.arange(0, C)
    from_start = tl.full((C,), 1.0, tl.float32)
    to_end = tl.full((C,), 1.0, tl.float32)
    carried = 1.0
    if DECAY:
        base = cumulated + (bh.to(tl.int64) * chunks + n) * C
        G = tl.load(base + i)
        last = tl.load(base + C - 1)
        from_start = tl.exp2(G.to(tl.float32))
        to_end = tl.exp2((last - G).to(tl.float32))
        carried = tl.exp2(last.to(tl.float32))
    if DOCUMENTS:
        own = documents + b.to(tl.int64) * T
        doc = tl.load(own + tl.minimum(n * C + i, T - 1))
        first = tl.load(own + tl.maximum(n * C - 1, 0), mask=n > 0, other=0)
        final = tl.load(own + tl.minimum(n * C + C - 1, T - 1))
        from_start = tl.where(doc == first, from_start, 0.0)
        to_end = tl.where(doc == final, to_end, 0.0)
        carried = tl.where(first == final, carried, 0.0)
    return from_start, to_end, carried


@triton.jit
def kept(
    cumulated,
    documents,
    bh,
    b,
    n,
    chunks,
    T,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Γ `[C, C]`: what is left of the column's write at the row, on and below the diagonal; TURNED: its transpose."""
    i = tl.arange(0, C)
    keep = i[:, None] <= i[None, :] if TURNED else i[:, None] >= i[None, :]
    if DOCUMENTS:
        doc = tl.load(documents + b.to(tl.int64) * T + tl.minimum(n * C + i, T - 1))
        keep = keep & (doc[:, None] == doc[None, :])
    if DECAY:
        G = tl.load(cumulated + (bh.to(tl.int64) * chunks + n) * C + i)
        left = (G[None, :] - G[:, None]) if TURNED else (G[:, None] - G[None, :])
        # Masked before the exponential: on the other side of the diagonal it would overflow.
        return tl.exp2(tl.where(keep, left.to(tl.float32), float("-inf")))
    return tl.where(keep, 1.0, 0.0)


@triton.jit
def off_diagonal(tile, C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.where(i[:, None] == i[None, :], 0.0, tile)
