"""Prepare the chunks of a memory with a decay per key channel, and the device functions that all channel kernels share.

Here a gate multiplies every channel by another number, so it cannot leave the products over channels as it does with one
decay per head (`forward.py`). It goes into their factors, by recursive halving. Rows i in the second half of 2h rows look
at rows j in the first half, whose last row is m:

    Σ_c q_ic x_jc e^{G_ic - G_jc} = Σ_c (q_ic e^{G_ic - G_mc}) (x_jc e^{G_mc - G_jc})

Every exponent is ≤ 0, however strong the decay. All blocks of one h are one product of C × C, of which the lower left
corners are kept; log2 C products make up the lower triangle. The diagonal has no gate.

**Prepare** (parallel over chunks) stores these tables, and *gated copies* of what the scans multiply with the state: q̃ and b̃
decay from the start of the chunk to their row, x̃ from its row to the end. b̃ also has the factor -β. Documents that begin
inside the chunk are part of them: rows that do not see the incoming state, or that the outgoing one does not see, are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.forward import invert_unit_lower
from prism.engine.kernels.memory.tiles import load_rows


@triton.jit
def visible(tile, documents, b, t, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """`tile` `[C, C]` with zeros where two rows belong to different documents."""
    if DOCUMENTS:
        doc = tl.load(documents + b.to(tl.int64) * T + tl.minimum(t + tl.arange(0, C), T - 1))
        return tl.where(doc[:, None] == doc[None, :], tile, 0.0)
    return tile


@triton.jit
def in_corner(tile, l, C: tl.constexpr, TURNED: tl.constexpr):
    """`tile` `[C, C]` in the lower left corners of its diagonal blocks of 2h rows, h = 2^l, and zeros elsewhere. TURNED: in
    their upper right corners."""
    i = tl.arange(0, C)
    late = (i >> l) % 2 == 1
    # The number of the block, or a number that no other row has: two vectors to compare, where a table of pairs would not
    # fit into the registers.
    later, earlier = tl.where(late, i >> (l + 1), -1), tl.where(late, -2, i >> (l + 1))
    if TURNED:
        return tl.where(earlier[:, None] == later[None, :], tile, tl.zeros_like(tile))
    return tl.where(later[:, None] == earlier[None, :], tile, tl.zeros_like(tile))


@triton.jit
def from_middle(G, own, l, C: tl.constexpr, K: tl.constexpr):
    """How much of a write is left between a row and the middle of its block of 2h rows, h = 2^l, `[C, BK]`. `own` points to
    G."""
    middle = (tl.arange(0, C) | ((2 << l) - 1)) - (1 << l)
    return tl.exp2(-tl.abs(G - tl.load(own[None, :] + middle[:, None] * K)).to(tl.float32))


@triton.jit
def load_before(own, C: tl.constexpr, K: tl.constexpr):
    """G of the row before each one, `[C, BK]`; zero before the first."""
    i = tl.arange(0, C)
    return tl.load(own[None, :] + (i - 1)[:, None] * K, mask=(i > 0)[:, None], other=0.0)


@triton.jit
def document_ends(documents, b, t, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Which rows see the incoming state `[C]`, which the outgoing state sees `[C]`, and whether it contains the incoming one,
    as numbers 1 and 0."""
    first = tl.full((C,), 1.0, tl.float32)
    final = tl.full((C,), 1.0, tl.float32)
    carried = 1.0
    if DOCUMENTS:
        own = documents + b.to(tl.int64) * T
        doc = tl.load(own + tl.minimum(t + tl.arange(0, C), T - 1))
        incoming = tl.load(own + tl.minimum(tl.maximum(t - 1, 0), T - 1), mask=t > 0, other=0)
        outgoing = tl.load(own + tl.minimum(t + C - 1, T - 1))
        first = tl.where(doc == incoming, 1.0, 0.0)
        final = tl.where(doc == outgoing, 1.0, 0.0)
        carried = tl.where(incoming == outgoing, 1.0, 0.0)
    return first, final, carried


@triton.jit
def load_strength(strength, b, t, h, T, H, C: tl.constexpr, STRENGTH: tl.constexpr):
    """-β `[C]`, or -1."""
    i = t + tl.arange(0, C)
    if STRENGTH:
        return -tl.load(strength + (b.to(tl.int64) * T + i) * H + h, mask=i < T, other=0.0)
    return tl.full((C,), -1.0, tl.float32)


@triton.jit(do_not_specialize=["T", "H", "padded"])
def channel_prepare_kernel(
    q,
    x,
    erase_key,
    log_decay,
    strength,
    documents,
    cumulated,
    asked,
    lookups,
    keys,
    carried,
    grams,
    inverse,
    T,
    H,
    padded,
    J: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    BEFORE: tl.constexpr,
    UNDECAYED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per chunk and head; R heads share q, x and `erase_key`. Writes G in base 2, `cumulated` `[B, H, padded, K]`;
    q̃ and b̃, `asked` and `lookups` `[B, H, chunks, C, K]`; x̃, `keys` `[B, H, chunks, J, C, K]`; e^{G_C}, `carried`
    `[B, H, chunks, K]`; `grams` `[B, H, chunks, 2J or J, C, C]`, N_j of every column and then -β ⊙ M_j; T⁻¹, `inverse`
    `[B, H, chunks, C, C]`."""
    chunks = padded // C
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = bh // H, bh % H
    group = h // R
    chunk = bh * chunks + n
    t = n * C
    i = tl.arange(0, C)
    GRAMS: tl.constexpr = 2 * J if ERASE else J
    first, final, whole = document_ends(documents, b, t, T, C, DOCUMENTS)
    scale = load_strength(strength, b, t, h, T, H, C, STRENGTH)

    for j in tl.static_range(J):
        seen_q = tl.zeros((C, C), tl.float32)
        seen_b = tl.zeros((C, C), tl.float32)
        same_token = tl.zeros((C,), tl.float32)
        for k in tl.range(0, K, BK, num_stages=1):  # pipelined, it would load sums before they are stored
            channels = k + tl.arange(0, BK)
            own = cumulated + (bh.to(tl.int64) * padded + t) * K + channels
            if j == 0:
                given = log_decay + ((b.to(tl.int64) * T + t + i) * H + h)[:, None] * K + channels[None, :]
                g = tl.load(given, mask=(t + i < T)[:, None], other=0.0)
                # As in `prepare_kernel`: a stronger decay would take all digits from the gates of nearby tokens.
                g = tl.where(g < -128.0, -128.0, g).to(cumulated.dtype.element_ty)
                tl.store(own[None, :] + i[:, None] * K, tl.cumsum(g, 0) * 1.4426950408889634)
                tl.debug_barrier()
            G = tl.load(own[None, :] + i[:, None] * K)
            last = tl.load(own + (C - 1) * K)
            E = load_before(own, C, K) if BEFORE or UNDECAYED else G
            key = load_rows(x, b, t, (group * J + j) * K + k, C, BK).to(tl.float32)
            query = load_rows(q, b, t, group * K + k, C, BK).to(tl.float32)
            to_end = tl.exp2((last[None, :] - G).to(tl.float32)) * final[:, None]
            keys.store([(chunk * J + j) * C, k], (key * to_end).to(keys.dtype))
            if ERASE:
                if TIED:
                    lookup = load_rows(x, b, t, group * (J * K) + k, C, BK).to(tl.float32) * scale[:, None]
                else:
                    lookup = load_rows(erase_key, b, t, group * K + k, C, BK).to(tl.float32) * scale[:, None]
            if j == 0:
                tl.store(carried + chunk.to(tl.int64) * K + channels, tl.exp2(last.to(tl.float32)) * whole)
                start = tl.exp2((E if BEFORE else G).to(tl.float32)) * first[:, None]
                asked.store([chunk * C, k], (query * start).to(asked.dtype))
                if ERASE:
                    start = tl.exp2((E if UNDECAYED else G).to(tl.float32)) * first[:, None]
                    lookups.store([chunk * C, k], (lookup * start).to(lookups.dtype))
            for l in tl.range(0, LEVELS, num_stages=1):
                near = from_middle(G, own, l, C, K)
                after = from_middle(E, own, l, C, K) if BEFORE or UNDECAYED else near
                right = tl.trans((key * near).to(x.dtype))
                left = (query * (after if BEFORE else near)).to(x.dtype)
                seen_q += in_corner(tl.dot(left, right, input_precision=PRECISION), l, C, False)
                if ERASE:
                    left = (lookup * (after if UNDECAYED else near)).to(x.dtype)
                    seen_b += in_corner(tl.dot(left, right, input_precision=PRECISION), l, C, False)
            if not BEFORE:
                same_token += tl.sum(query * key, 1)
        seen_q = visible(seen_q, documents, b, t, T, C, DOCUMENTS)
        seen_q += tl.where(i[:, None] == i[None, :], same_token[:, None], 0.0)
        grams.store([(chunk * GRAMS + j) * C, 0], seen_q.to(grams.dtype))
        if ERASE:
            seen_b = visible(seen_b, documents, b, t, T, C, DOCUMENTS)
            grams.store([(chunk * GRAMS + J + j) * C, 0], seen_b.to(grams.dtype))
            if j == 0:
                inverse.store([chunk * C, 0], invert_unit_lower(tl.trans(-seen_b), C, PRECISION).to(inverse.dtype))
