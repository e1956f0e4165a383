"""Backward kernel of the writes, all chunks in parallel: gradients of the keys and values of every column.

One program per chunk, group and column:

    dX_j = dN_jᵀ Q + dM_jᵀ B + e^{G_C - G} ⊙ Y_j dS'ᵀ         (where B is X_0, dB is added to dX_0)
    dW_j = N_jᵀ dO + M_jᵀ dR + e^{G_C - G} ⊙ X_j dS'          for j > 0; dW_0 = dU is known

`backward_queries.py` says what the letters are, how gates get their gradient, and which products are avoided.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.tiles import (
    borders,
    diagonal,
    heads_first,
    kept,
    load_gate,
    load_rows,
    load_tokens,
    off_diagonal,
    same_token,
    store_rows,
)


@triton.jit
def key_products(
    x,
    first_key,
    asking,
    first_asking,
    asking_width,
    b,
    t,
    T,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X_j Qᵀ, or X_j Bᵀ (SUBSTEPS is then 1), over all key channels."""
    gram = tl.zeros((C, C), tl.float32)
    for c in range(0, K, BK):
        keys = load_rows(x, b, t, first_key + c, C, BK)
        asked = load_tokens(asking, b, t, first_asking + c, T, asking_width, C, BK, SUBSTEPS)
        gram = tl.dot(keys, tl.trans(asked), gram, input_precision=PRECISION)
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
    b,
    h,
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
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of one column and head. FED: column 0, which the erase feeds (`values` are Y_0). For any other column
    `values` are w, and dW_j is computed too. Returns dX_j `[C, BK]`; stores it if no other head shares the key."""
    BLOCKS: tl.constexpr = K // BK
    SIDES: tl.constexpr = 2 if ERASE else 1
    bh, t, k, group = b * H + h, n * C, block * BK, h // GROUP
    matrix = (bh * (padded // C) + n) * V
    key = (group * J + j) * K
    value = h * V if FED else (h * J + j) * V
    place = ((j * BLOCKS + block) * heads + bh).to(tl.int64) * padded + t + tl.arange(0, C)

    # Over all value channels: the outgoing state's part of dX_j, and the gradients of the two grams below.
    dx = tl.zeros((C, BK), tl.float32)
    d_gram_q = tl.zeros((C, C), tl.float32)
    d_gram_b = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        written = load_rows(values, b, t, value + v, C, BV)
        dx = tl.dot(written, d_states.load([matrix + v, k]), dx, input_precision=PRECISION)
        answered = load_tokens(d_o, b, t, h * V + v, T, H * V, C, BV, SUBSTEPS)
        d_gram_q = tl.dot(written, tl.trans(answered), d_gram_q, input_precision=PRECISION)
        if ERASE:
            wanted = load_rows(d_w, b, t, h * (J * V) + v, C, BV)
            d_gram_b = tl.dot(written, tl.trans(wanted), d_gram_b, input_precision=PRECISION)
    _, to_end, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, SUBSTEPS)
    dx *= to_end[:, None]
    keys = load_rows(x, b, t, key + k, C, BK)
    tail = tl.sum(keys.to(tl.float32) * dx, 1)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, True, SUBSTEPS)
    asked = load_tokens(q, b, t, group * K + k, T, H // GROUP * K, C, BK, SUBSTEPS)
    if PRECISION == "ieee":  # as in `looked_up`
        if SUBSTEPS == 1:
            own = diagonal(d_gram_q, C)[:, None] * asked.to(tl.float32)
            d_gram_q = off_diagonal(d_gram_q, C)
        else:
            same = same_token(t, C, SUBSTEPS)
            own = tl.dot(tl.where(same, d_gram_q * weights, 0.0).to(x.dtype), asked, input_precision=PRECISION)
            d_gram_q = tl.where(same, 0.0, d_gram_q)
    dx = tl.dot((d_gram_q * weights).to(x.dtype), asked, dx, input_precision=PRECISION)
    if ERASE:
        beta = tl.full((C,), 1.0, tl.float32)
        if STRENGTH:
            beta = load_gate(strengths, bh, t, padded, C)
        strict = off_diagonal(weights * -beta[None, :], C)
        looking = x if TIED else erase_key
        first = group * (J * K) if TIED else group * K
        lookup = load_rows(looking, b, t, first + k, C, BK)
        if PRECISION == "ieee" and SUBSTEPS > 1:
            own = tl.dot(tl.where(same, d_gram_b * strict, 0.0).to(x.dtype), lookup, own, input_precision=PRECISION)
            d_gram_b = tl.where(same, 0.0, d_gram_b)
        dx = tl.dot((d_gram_b * strict).to(x.dtype), lookup, dx, input_precision=PRECISION)
    if DECAY:
        tl.store(tails + place, tail)
        if BK <= 64:  # loaded again: not keeping the keys in registers lets a third program fit on a multiprocessor
            keys = load_rows(x, b, t, key + k, C, BK)
        tl.store(
            d_cumulated + (SIDES * BLOCKS * heads).to(tl.int64) * padded + place,
            tail - tl.sum(keys.to(tl.float32) * dx, 1),
        )
    if PRECISION == "ieee":
        dx += own
    if GROUP == 1:
        store_key_gradient(d_x, dx, b, t, key + k, C, BK, FED and TIED)

    if not FED and block == 0:
        # How much the queries saw of this column, N_jᵀ, then the erases, -β ⊙ M_jᵀ.
        seen_q = key_products(x, key, q, group * K, H // GROUP * K, b, t, T, K, BK, C, SUBSTEPS, PRECISION)
        seen_q = (weights * seen_q).to(x.dtype)
        if ERASE:
            seen_b = key_products(x, key, looking, first, 0, b, t, T, K, BK, C, 1, PRECISION)
            seen_b = (strict * seen_b).to(x.dtype)
        keys = load_rows(x, b, t, key, C, BK)
        for v in range(0, V, BV):
            dw = tl.dot(keys, tl.trans(d_states.load([matrix + v, 0])), input_precision=PRECISION)
            for c in tl.static_range(BK, K, BK):
                outgoing = tl.trans(d_states.load([matrix + v, c]))
                dw = tl.dot(load_rows(x, b, t, key + c, C, BK), outgoing, dw, input_precision=PRECISION)
            dw *= to_end[:, None]
            answered = load_tokens(d_o, b, t, h * V + v, T, H * V, C, BV, SUBSTEPS)
            dw = tl.dot(seen_q, answered, dw, input_precision=PRECISION)
            if ERASE:
                wanted = load_rows(d_w, b, t, h * (J * V) + v, C, BV)
                dw = tl.dot(seen_b, wanted, dw, input_precision=PRECISION)
            store_rows(d_w, b, t, value + v, dw, C, BV)
    return dx


@triton.jit
def store_key_gradient(d_x, dx, b, t, column, C: tl.constexpr, BK: tl.constexpr, ADDED: tl.constexpr):
    """Store dX_j. ADDED: to what `backward_queries_kernel` has stored, where the key is also the erase's."""
    if ADDED:
        dx += load_rows(d_x, b, t, column, C, BK).to(tl.float32)
    store_rows(d_x, b, t, column, dx, C, BK)


# Repeats the argument list of `backward_queries_kernel`: a Triton kernel takes no structures.
@triton.jit(do_not_specialize=["T", "H", "padded"])
def backward_writes_kernel(
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
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`fed` is Y_0 `[B, T, H, V]`, None without an erase. `backward_decay_kernel` describes the partial sums."""
    BLOCKS: tl.constexpr = K // BK
    chunks = padded // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    j = (pid // BLOCKS) % J
    b, n, group = heads_first(pid // (BLOCKS * J), chunks, H // GROUP)
    heads = tl.num_programs(0) // (BLOCKS * J * chunks) * GROUP
    if ERASE and j == 0:
        group_gradients(
            q, x, fed, erase_key, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails,
            T, H, padded, heads, b, group, n, j, block,
            J, K, V, BK, BV, C, STEP, True, ERASE, TIED, STRENGTH, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
        )  # fmt: skip
    elif not ERASE or J > 1:
        group_gradients(
            q, x, w, erase_key, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails,
            T, H, padded, heads, b, group, n, j, block,
            J, K, V, BK, BV, C, STEP, False, ERASE, TIED, STRENGTH, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
        )  # fmt: skip


@triton.jit
def group_gradients(
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
    b,
    group,
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
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`column_gradients` of all heads that share a key, added up."""
    if GROUP == 1:
        column_gradients(
            q, x, values, erase_key, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails,
            T, H, padded, heads, b, group, n, j, block,
            J, K, V, BK, BV, C, STEP, FED, ERASE, TIED, STRENGTH, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
        )  # fmt: skip
    else:
        dx = tl.zeros((C, BK), tl.float32)
        for h in range(group * GROUP, (group + 1) * GROUP):
            dx += column_gradients(
                q, x, values, erase_key, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails,
                T, H, padded, heads, b, h, n, j, block,
                J, K, V, BK, BV, C, STEP, FED, ERASE, TIED, STRENGTH, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
            )  # fmt: skip
        store_key_gradient(d_x, dx, b, n * C, (group * J + j) * K + block * BK, C, BK, FED and TIED)
