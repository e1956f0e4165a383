"""Backward, the parallel half, columns: what was written. One program a chunk, head and column; those of a chunk run next to
one another and find each other's tiles in the L2 cache.

dX_j = dN_jᵀ Q + dM_jᵀ B + e^{G_C - G} ⊙ Y_j dS'ᵀ         (where B is X_0, dX_0 takes dB up)
dW_j = N_jᵀ dO + M_jᵀ dR + e^{G_C - G} ⊙ X_j dS'          for j > 0; dW_0 = dU is known
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, diagonal, kept, load_gate, load_rows, off_diagonal, store_rows


@triton.jit
def key_products(
    x,
    first_key,
    asking,
    first_asking,
    b,
    t,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X_j Qᵀ, or X_j Bᵀ, over all key channels."""
    gram = tl.zeros((C, C), tl.float32)
    for c in range(0, K, BK):
        keys = load_rows(x, b, t, first_key + c, C, BK)
        gram = tl.dot(keys, tl.trans(load_rows(asking, b, t, first_asking + c, C, BK)), gram, input_precision=PRECISION)
    return gram


@triton.jit
def column_gradients(
    q,
    x,
    values,
    erase_key,
    strengths,
    cumulated,
    documents,
    d_o,
    d_states,
    d_w,
    d_x,
    d_cumulated,
    tails,
    T,
    H,
    padded,
    heads,
    bh,
    n,
    j,
    block,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    FED: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """FED: column 0, which the erase feeds (`values` are Y_0); any other column has its values in w, and dW_j to find."""
    BLOCKS: tl.constexpr = K // BK
    SIDES: tl.constexpr = 2 if ERASE else 1
    chunks = padded // C
    b, h = bh // H, bh % H
    t = n * C
    k = block * BK
    matrix = (bh * chunks + n) * V
    key = (h * J + j) * K
    value = h * V if FED else (h * J + j) * V
    place = ((j * BLOCKS + block) * heads + bh).to(tl.int64) * padded + t + tl.arange(0, C)

    # Over all value channels: the outgoing state's share of dX_j, and the gradients of the two grams below.
    dx = tl.zeros((C, BK), tl.float32)
    d_gram_q = tl.zeros((C, C), tl.float32)
    d_gram_b = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        written = load_rows(values, b, t, value + v, C, BV)
        dx = tl.dot(written, d_states.load([matrix + v, k]), dx, input_precision=PRECISION)
        answered = load_rows(d_o, b, t, h * V + v, C, BV)
        d_gram_q = tl.dot(written, tl.trans(answered), d_gram_q, input_precision=PRECISION)
        if ERASE:
            wanted = load_rows(d_w, b, t, h * (J * V) + v, C, BV)
            d_gram_b = tl.dot(written, tl.trans(wanted), d_gram_b, input_precision=PRECISION)
    _, to_end, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    dx *= to_end[:, None]
    keys = load_rows(x, b, t, key + k, C, BK)
    tail = tl.sum(keys.to(tl.float32) * dx, 1)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, True)
    asked = load_rows(q, b, t, h * K + k, C, BK)
    if PRECISION == "ieee":  # as in `lookups.py`
        own = diagonal(d_gram_q, C)[:, None] * asked.to(tl.float32)
        d_gram_q = off_diagonal(d_gram_q, C)
    dx = tl.dot((d_gram_q * weights).to(x.dtype), asked, dx, input_precision=PRECISION)
    if ERASE:
        beta = tl.full((C,), 1.0, tl.float32)
        if STRENGTH:
            beta = load_gate(strengths, bh, t, padded, C)
        strict = off_diagonal(weights * -beta[None, :], C)
        looking = x if TIED else erase_key
        first = h * (J * K) if TIED else h * K
        lookup = load_rows(looking, b, t, first + k, C, BK)
        dx = tl.dot((d_gram_b * strict).to(x.dtype), lookup, dx, input_precision=PRECISION)
    if DECAY:
        tl.store(tails + place, tail)
        if BK <= 64:  # without the keys' registers from above until here a third program fits onto a multiprocessor
            keys = load_rows(x, b, t, key + k, C, BK)
        tl.store(
            d_cumulated + (SIDES * BLOCKS * heads).to(tl.int64) * padded + place,
            tail - tl.sum(keys.to(tl.float32) * dx, 1),
        )
    if PRECISION == "ieee":
        dx += own
    if FED and TIED:
        dx += load_rows(d_x, b, t, key + k, C, BK).to(tl.float32)
    store_rows(d_x, b, t, key + k, dx, C, BK)

    if not FED and block == 0:
        # How much the queries saw of this column, N_jᵀ, then the erases, -β ⊙ M_jᵀ.
        seen_q = (weights * key_products(x, key, q, h * K, b, t, K, BK, C, PRECISION)).to(x.dtype)
        if ERASE:
            seen_b = (strict * key_products(x, key, looking, first, b, t, K, BK, C, PRECISION)).to(x.dtype)
        keys = load_rows(x, b, t, key, C, BK)
        for v in range(0, V, BV):
            dw = tl.dot(keys, tl.trans(d_states.load([matrix + v, 0])), input_precision=PRECISION)
            for c in tl.static_range(BK, K, BK):
                outgoing = tl.trans(d_states.load([matrix + v, c]))
                dw = tl.dot(load_rows(x, b, t, key + c, C, BK), outgoing, dw, input_precision=PRECISION)
            dw *= to_end[:, None]
            dw = tl.dot(seen_q, load_rows(d_o, b, t, h * V + v, C, BV), dw, input_precision=PRECISION)
            if ERASE:
                wanted = load_rows(d_w, b, t, h * (J * V) + v, C, BV)
                dw = tl.dot(seen_b, wanted, dw, input_precision=PRECISION)
            store_rows(d_w, b, t, value + v, dw, C, BV)


@triton.jit(do_not_specialize=["T", "H", "padded"])
def writes_kernel(
    q,
    x,
    fed,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
    d_o,
    d_states,
    d_w,
    d_x,
    d_cumulated,
    tails,
    T,
    H,
    padded,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`fed` is Y_0 `[B, T, H, V]`, None without an erase. Partial sums are described in `decay.py`."""
    BLOCKS: tl.constexpr = K // BK
    chunks = padded // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    j = (pid // BLOCKS) % J
    n = (pid // (BLOCKS * J)) % chunks
    bh = pid // (BLOCKS * J * chunks)
    heads = tl.num_programs(0) // (BLOCKS * J * chunks)
    if ERASE and j == 0:
        column_gradients(
            q, x, fed, erase_key, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails,
            T, H, padded, heads, bh, n, j, block,
            J, K, V, BK, BV, C, STEP, True, ERASE, TIED, STRENGTH, DECAY, DOCUMENTS, PRECISION,
        )  # fmt: skip
    elif not ERASE or J > 1:
        column_gradients(
            q, x, w, erase_key, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails,
            T, H, padded, heads, bh, n, j, block,
            J, K, V, BK, BV, C, STEP, False, ERASE, TIED, STRENGTH, DECAY, DOCUMENTS, PRECISION,
        )  # fmt: skip
