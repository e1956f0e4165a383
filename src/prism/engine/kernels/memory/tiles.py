"""Device functions that all chunk kernels share: tiles through tensor descriptors, and how much of a write remains.

A descriptor sees token tensors as `[B, T, H · columns · width]`, and a tile is C tokens of one column, so that rows beyond T
read as zeros and are never written. Widths are powers of two ≥ 16 (`dispatch.py` pads them). Gates are `[B, H, padded]` here,
with T padded to whole chunks. Cumulative log-decays are in base 2 and restart every STEP tokens, the chunk of the scans,
which may be shorter than that of the parallel passes.

**Groups.** q, x and the erase's keys may have fewer heads than the values: head h reads group h // GROUP.

**Sub-steps.** A token may take several rows (SUBSTEPS, DeltaProduct). T counts rows, and so does everything that is erased or
written. Queries, outputs and their gradients, log-decays and documents have one row per token: a query belongs to its token's
last row, a decay to the first.

**Reach.** The norm of the matrix by which a chunk multiplies its incoming state is at most 2^reach: the product of its decays
and of the norms of its tokens' I - a bᵀ. The matrix is 0 where a document starts. A chain of chunks whose reaches sum up to
less than -FORGOTTEN leaves nothing of what came before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNROLLED = tl.constexpr(5)
"""Up to this many columns, loops over columns are unrolled: their tiles are then loaded ahead. More would not fit."""

FORGOTTEN = tl.constexpr(192.0)
"""Bits by which a number up to 2^43 shrinks to 0 in float32, whose smallest is 2^-149."""
SURVEYED = tl.constexpr(256)
"""Chunks whose reaches are summed together."""


@triton.jit
def log_growth(along, key, lookup, beta, TIED: tl.constexpr):
    """log₂ ‖I - a bᵀ‖ of each row, `[C]`, where a = β · `key` and b = `lookup` `[C, K]`, and `along` = a·b `[C]`.

    One singular value is |1 - a·b| if a and b are parallel (TIED), and all others are 1. If they are not, two differ from 1,
    and their squares have this sum and product."""
    if TIED:
        return tl.log2(tl.maximum(tl.abs(1.0 - along), 1.0))
    else:
        a, b = key.to(tl.float32), lookup.to(tl.float32)
        both = 2.0 - 2.0 * along + beta * beta * tl.sum(a * a, 1) * tl.sum(b * b, 1)
        product = (1.0 - along) * (1.0 - along)
        largest = 0.5 * (both + tl.sqrt(tl.maximum(both * both - 4.0 * product, 0.0)))
        return 0.5 * tl.log2(tl.maximum(largest, 1.0))


@triton.jit
def store_reach(
    reach,
    G,
    growth,
    documents,
    place,
    b,
    t,
    T,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SUBSTEPS: tl.constexpr,
):
    """Store a chunk's reach: its decays, and the growth of its erases."""
    total = growth + 0.0
    if DECAY:
        total += tl.sum(tl.where(tl.arange(0, C) == C - 1, G.to(tl.float32), 0.0), 0)  # the last; NaN stays NaN
    if DOCUMENTS:
        own = documents + b.to(tl.int64) * (T // SUBSTEPS)
        first = tl.load(own + tl.minimum(tl.maximum(t - 1, 0), T - 1) // SUBSTEPS, mask=t > 0, other=0)
        final = tl.load(own + tl.minimum(t + C - 1, T - 1) // SUBSTEPS)
        total = tl.where(first == final, total, -65536.0)  # not more: sums of it keep a hundredth of a bit
    tl.store(reach + place, total)


@triton.jit
def lasting_chunks(reach, near, count, direction):
    """How many of `count` chunks, from `near` on in this direction, still matter where `near` begins (or ends); `count` + 1 if
    what came before all of them does. Comparisons are such that a NaN is never forgotten."""
    i = tl.arange(0, SURVEYED)
    passed = 0.0
    lasting = 0
    for first in range(0, count, SURVEYED):
        own = tl.load(reach + near + direction * (first + i), mask=first + i < count, other=0.0)
        until = passed + tl.cumsum(own, 0)
        passed += tl.sum(own, 0)
        last = tl.max(tl.where((until - own <= -FORGOTTEN) | (first + i >= count), 0, first + i + 1), 0)
        lasting = tl.maximum(lasting, last)
    return tl.where(passed <= -FORGOTTEN, lasting, count + 1)


@triton.jit
def heads_first(place, chunks, heads):
    """The sequence, chunk and head of a program: heads vary first, so that programs at work read neighbouring memory."""
    return place // (heads * chunks), (place // heads) % chunks, place % heads


@triton.jit
def load_rows(tensor, b, t, column, C: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens t … t + C of sequence b, `[C, WIDTH]`."""
    return tensor.load([b, t, column]).reshape(C, WIDTH)


@triton.jit
def store_rows(tensor, b, t, column, tile, C: tl.constexpr, WIDTH: tl.constexpr):
    """Store `tile` `[C, WIDTH]` as tokens t … t + C of sequence b."""
    tensor.store([b, t, column], tile.to(tensor.dtype).reshape(1, C, WIDTH))


@triton.jit
def last_rows(b, t, T, row_width, C: tl.constexpr, WIDTH: tl.constexpr, SUBSTEPS: tl.constexpr):
    """Where `[B, T / SUBSTEPS, row_width]` has the tokens of rows t … t + C, `[C, WIDTH]`, and which rows are the last."""
    row = t + tl.arange(0, C)
    place = (b.to(tl.int64) * (T // SUBSTEPS) + row // SUBSTEPS) * row_width
    last = (row % SUBSTEPS == SUBSTEPS - 1) & (row < T)
    return place[:, None] + tl.arange(0, WIDTH)[None, :], last[:, None]


@triton.jit
def load_tokens(tensor, b, t, column, T, row_width, C: tl.constexpr, WIDTH: tl.constexpr, SUBSTEPS: tl.constexpr):
    """Rows t … t + C of a tensor with one row per token, `[C, WIDTH]`: zeros at all rows but a token's last."""
    if SUBSTEPS == 1:
        return load_rows(tensor, b, t, column, C, WIDTH)
    else:
        place, last = last_rows(b, t, T, row_width, C, WIDTH, SUBSTEPS)
        return tl.load(tensor + column + place, mask=last, other=0.0)


@triton.jit
def store_tokens(
    tensor, b, t, column, tile, T, row_width, C: tl.constexpr, WIDTH: tl.constexpr, SUBSTEPS: tl.constexpr
):
    """Store those rows of `tile` `[C, WIDTH]` that are a token's last in a tensor with one row per token."""
    if SUBSTEPS == 1:
        store_rows(tensor, b, t, column, tile, C, WIDTH)
    else:
        place, last = last_rows(b, t, T, row_width, C, WIDTH, SUBSTEPS)
        tl.store(tensor + column + place, tile.to(tensor.dtype.element_ty), mask=last)


@triton.jit
def load_gate(gate, bh, t, padded, C: tl.constexpr):
    """One number per token, `[C]`."""
    return tl.load(gate + bh.to(tl.int64) * padded + t + tl.arange(0, C))


@triton.jit
def load_cumulated(cumulated, bh, t, padded, C: tl.constexpr, STEP: tl.constexpr):
    """G_i = Σ g from token t to t + i, `[C]`, and G_{C-1}."""
    i = tl.arange(0, C)
    base = cumulated + bh.to(tl.int64) * padded + t
    G = tl.load(base + i)
    last = tl.load(base + C - 1)
    for r in tl.static_range(STEP, C, STEP):
        earlier = tl.load(base + r - 1)
        G += tl.where(i >= r, earlier, 0.0)
        last += earlier
    return G, last


@triton.jit
def borders(
    cumulated,
    documents,
    bh,
    b,
    t,
    padded,
    T,
    C: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    SUBSTEPS: tl.constexpr = 1,
):
    """The fractions that remain: of the incoming state at each row `[C]`, of each row's write at the end of the chunk `[C]`,
    and of the incoming state at the end."""
    from_start = tl.full((C,), 1.0, tl.float32)
    to_end = tl.full((C,), 1.0, tl.float32)
    carried = 1.0
    if DECAY:
        G, last = load_cumulated(cumulated, bh, t, padded, C, STEP)
        from_start = tl.exp2(G.to(tl.float32))
        to_end = tl.exp2((last - G).to(tl.float32))
        carried = tl.exp2(last.to(tl.float32))
    if DOCUMENTS:
        own = documents + b.to(tl.int64) * (T // SUBSTEPS)
        doc = tl.load(own + tl.minimum(t + tl.arange(0, C), T - 1) // SUBSTEPS)
        first = tl.load(own + tl.minimum(tl.maximum(t - 1, 0), T - 1) // SUBSTEPS, mask=t > 0, other=0)
        final = tl.load(own + tl.minimum(t + C - 1, T - 1) // SUBSTEPS)
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
    t,
    padded,
    T,
    C: tl.constexpr,
    STEP: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    SUBSTEPS: tl.constexpr = 1,
):
    """Γ `[C, C]`: the fraction of the column's write that remains at the row, on and below the diagonal; TURNED: transposed."""
    G = tl.zeros((C,), tl.float32)
    if DECAY:
        G, _ = load_cumulated(cumulated, bh, t, padded, C, STEP)
    return left_of_writes(G, documents, b, t, T, C, DECAY, DOCUMENTS, TURNED, SUBSTEPS)


@triton.jit
def left_of_writes(
    G,
    documents,
    b,
    t,
    T,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    SUBSTEPS: tl.constexpr = 1,
):
    """Γ as in `kept`, from G."""
    i = tl.arange(0, C)
    keep = i[:, None] <= i[None, :] if TURNED else i[:, None] >= i[None, :]
    if DOCUMENTS:
        doc = tl.load(documents + b.to(tl.int64) * (T // SUBSTEPS) + tl.minimum(t + i, T - 1) // SUBSTEPS)
        keep = keep & (doc[:, None] == doc[None, :])
    if DECAY:
        left = (G[None, :] - G[:, None]) if TURNED else (G[:, None] - G[None, :])
        # Masked before the exponential, which would overflow on the other side of the diagonal.
        return tl.exp2(tl.where(keep, left.to(tl.float32), float("-inf")))
    return tl.where(keep, 1.0, 0.0)


@triton.jit
def off_diagonal(tile, C: tl.constexpr):
    """`tile` `[C, C]` with zeros on its diagonal."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] == i[None, :], 0.0, tile)


@triton.jit
def same_token(t, C: tl.constexpr, SUBSTEPS: tl.constexpr):
    """Which pairs of rows t … t + C are sub-steps of one token, `[C, C]`."""
    token = (t + tl.arange(0, C)) // SUBSTEPS
    return token[:, None] == token[None, :]


@triton.jit
def diagonal(tile, C: tl.constexpr):
    """The diagonal of `tile` `[C, C]`, `[C]`."""
    i = tl.arange(0, C)
    return tl.sum(tl.where(i[:, None] == i[None, :], tile, 0.0), 1)
