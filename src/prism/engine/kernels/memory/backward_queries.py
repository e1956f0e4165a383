"""Backward kernel of the queries, all chunks in parallel: gradients of queries, of the erase's lookups, and of strengths.

One program per chunk, group and side:

    dN_j = dO Y_jᵀ ⊙ Γ        dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ
    dM_j = dR Y_jᵀ ⊙ Γ        dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ        dR = -β ⊙ dU        dβ = -⟨B, the same with dU⟩

An erase is a query whose answer is fed back. One function serves both, in neighbouring programs that find each other's tiles
in the L2 cache. Gates only multiply rows of Q and B by e^G and rows of X_j by e^-G, so that

    dG_i = ⟨q_i, dq_i⟩ + ⟨b_i, db_i⟩ - Σ_j ⟨x_ij, dx_ij⟩        (dB and dX_0 taken separately even where B is X_0)

and dG needs no C × C matrix. Where heads share queries and keys, a program adds up the gradients of its group's heads.

No product's left factor is the transpose of another product's result: Triton 3.4 to 3.7.0 miscompiles that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.tiles import (
    UNROLLED,
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
    store_tokens,
)


@triton.jit
def looked_up(
    asking,
    first_asking,
    asking_width,
    answers,
    first_answer,
    answers_width,
    x,
    values,
    first_value,
    w,
    states,
    matrix,
    from_start,
    weights,
    b,
    h,
    group,
    t,
    T,
    k,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient `[C, BK]` of a query or lookup, from the gradient of its answer, and ⟨query, gradient⟩ `[C]` twice.

    `values` are those of column 0, the others are in `w`. APART: the first inner product leaves out what a query sees of its
    own token's writes. No gate multiplies that part; later it would only be the difference of two large numbers
    (`column_gradients` leaves it out too). A token has ROWS rows; SUBSTEPS is 1 for lookups, which every row has."""
    grad = tl.zeros((C, BK), tl.float32)
    gram = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        answered = load_tokens(answers, b, t, first_answer + v, T, answers_width, C, BV, SUBSTEPS)
        grad = tl.dot(answered, states.load([matrix + v, k]), grad, input_precision=PRECISION)
        written = load_rows(values, b, t, first_value + v, C, BV)
        gram = tl.dot(answered, tl.trans(written), gram, input_precision=PRECISION)
    grad *= from_start[:, None]
    keys = load_rows(x, b, t, group * (J * K) + k, C, BK)
    own = 0.0
    near = 0.0
    if APART:
        if ROWS == 1:
            own = diagonal(gram, C)[:, None] * keys.to(tl.float32)
            weights = off_diagonal(weights, C)
        else:
            near = tl.where(same_token(t, C, ROWS), weights, 0.0)
            own = tl.dot((gram * near).to(x.dtype), keys, input_precision=PRECISION)
            weights -= near
    grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    if J <= UNROLLED:
        for j in tl.static_range(1, J):
            grad, own = looked_up_in_column(
                grad, own, answers, first_answer, answers_width, x, w, weights, near, b, h, group, t, T, k, j,
                J, K, V, BK, BV, C, APART, ROWS, SUBSTEPS, PRECISION,
            )  # fmt: skip
    else:
        for j in range(1, J):
            grad, own = looked_up_in_column(
                grad, own, answers, first_answer, answers_width, x, w, weights, near, b, h, group, t, T, k, j,
                J, K, V, BK, BV, C, APART, ROWS, SUBSTEPS, PRECISION,
            )  # fmt: skip
    query = load_tokens(asking, b, t, first_asking + k, T, asking_width, C, BK, SUBSTEPS)
    along = tl.sum(query.to(tl.float32) * grad, 1)
    whole = along
    if APART:
        grad += own
        whole = tl.sum(query.to(tl.float32) * grad, 1)
    return grad, along, whole


@triton.jit
def looked_up_in_column(
    grad,
    own,
    answers,
    first_answer,
    answers_width,
    x,
    w,
    weights,
    near,
    b,
    h,
    group,
    t,
    T,
    k,
    j,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`grad` and `own` of `looked_up` with the part of column j > 0 added."""
    gram = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        answered = load_tokens(answers, b, t, first_answer + v, T, answers_width, C, BV, SUBSTEPS)
        written = load_rows(w, b, t, (h * J + j) * V + v, C, BV)
        gram = tl.dot(answered, tl.trans(written), gram, input_precision=PRECISION)
    keys = load_rows(x, b, t, (group * J + j) * K + k, C, BK)
    if APART:
        if ROWS == 1:
            own += diagonal(gram, C)[:, None] * keys.to(tl.float32)
        else:
            own = tl.dot((gram * near).to(x.dtype), keys, own, input_precision=PRECISION)
    return tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION), own


@triton.jit
def query_gradient(
    q,
    x,
    values,
    w,
    cumulated,
    documents,
    states,
    d_o,
    T,
    H,
    padded,
    b,
    h,
    n,
    k,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    ERASE: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ `[C, BK]` of one head, and ⟨q, dq⟩."""
    bh, t, group = b * H + h, n * C, h // GROUP
    matrix = (bh * (padded // C) + n) * V
    value = h * V if ERASE else h * (J * V)
    from_start, _, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, SUBSTEPS)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False, SUBSTEPS)
    dq, along, _ = looked_up(
        q, group * K, H // GROUP * K, d_o, h * V, H * V, x, values, value, w, states, matrix, from_start, weights,
        b, h, group, t, T, k, J, K, V, BK, BV, C, PRECISION == "ieee", SUBSTEPS, SUBSTEPS, PRECISION,
    )  # fmt: skip
    return dq, along


@triton.jit
def store_query_sums(
    rows,
    states,
    d_states,
    d_cumulated,
    touched,
    padded,
    heads,
    bh,
    n,
    block,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
):
    """Store the queries' part of dG of one head, ⟨q, dq⟩, and ⟨dS', S⟩, for the state's own decay."""
    chunks = padded // C
    matrix = (bh * chunks + n) * V
    place = (block * heads + bh).to(tl.int64) * padded + n * C + tl.arange(0, C)
    tl.store(d_cumulated + place, rows)
    product = tl.zeros((BV, BK), tl.float32)
    for v in range(0, V, BV):
        tile = [matrix + v, block * BK]
        product += states.load(tile).to(tl.float32) * d_states.load(tile).to(tl.float32)
    tl.store(touched + (block * heads + bh) * chunks + n, tl.sum(tl.sum(product, 1), 0))


@triton.jit
def erase_gradient(
    x,
    values,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
    states,
    d_w,
    d_strength,
    d_cumulated,
    T,
    H,
    padded,
    heads,
    b,
    h,
    n,
    block,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    SUBSTEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dB `[C, BK]` of one head. Stores dβ and the erase's part of dG."""
    BLOCKS: tl.constexpr = K // BK
    bh, t, k, group = b * H + h, n * C, block * BK, h // GROUP
    matrix = (bh * (padded // C) + n) * V
    from_start, _, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, SUBSTEPS)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False, SUBSTEPS)
    looking = x if TIED else erase_key
    first = group * (J * K) if TIED else group * K
    # β multiplies before the product is rounded, as in `column_gradients`: the two halves of dG cancel only if both were
    # rounded in the same way. Where β is too small to be divided out of dβ again, it multiplies later: what does not
    # cancel is then equally small.
    beta = tl.full((C,), 1.0, tl.float32)
    if STRENGTH:
        beta = load_gate(strengths, bh, t, padded, C)
    early = tl.where(tl.abs(beta) < 0.0625, 1.0, beta)
    APART: tl.constexpr = SUBSTEPS > 1 and PRECISION == "ieee"  # a lookup does not see its own row
    db, rows, whole = looked_up(
        looking, first, 0, d_w, h * (J * V), 0, x, values, h * V, w, states, matrix, from_start * -early,
        off_diagonal(weights * -early[:, None], C), b, h, group, t, T, k, J, K, V, BK, BV, C, APART,
        SUBSTEPS, 1, PRECISION,
    )  # fmt: skip
    late = beta / early
    if STRENGTH:
        i = t + tl.arange(0, C)
        at = ((block * (heads // H) + b).to(tl.int64) * T + i) * H + h
        tl.store(d_strength + at, whole / early, mask=i < T)
    if DECAY:
        place = ((BLOCKS + block) * heads + bh).to(tl.int64) * padded + t + tl.arange(0, C)
        tl.store(d_cumulated + place, rows * late)
    return db * late[:, None]


@triton.jit(do_not_specialize=["T", "H", "padded"])
def backward_queries_kernel(
    q,
    x,
    values,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
    states,
    d_o,
    d_states,
    d_w,
    d_q,
    d_x,
    d_erase_key,
    d_strength,
    d_cumulated,
    touched,
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
    """`values` are Y_0 `[B, T, H, V]`, or w itself without an erase. dB goes to `d_erase_key`, or into column 0 of `d_x`,
    where `backward_writes_kernel` adds to it. `d_strength` is `[K/BK, B, T, H]`; `backward_decay_kernel` describes the
    partial sums."""
    BLOCKS: tl.constexpr = K // BK
    SIDES: tl.constexpr = 2 if ERASE else 1
    chunks = padded // C
    pid = tl.program_id(0)
    side = pid % SIDES
    block = (pid // SIDES) % BLOCKS
    b, n, group = heads_first(pid // (SIDES * BLOCKS), chunks, H // GROUP)
    heads = tl.num_programs(0) // (SIDES * BLOCKS * chunks) * GROUP
    t = n * C
    k = block * BK

    if side == 0:
        if GROUP == 1:
            dq, rows = query_gradient(
                q, x, values, w, cumulated, documents, states, d_o, T, H, padded, b, group, n, k,
                J, K, V, BK, BV, C, STEP, ERASE, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
            )  # fmt: skip
            store_tokens(d_q, b, t, group * K + k, dq, T, H * K, C, BK, SUBSTEPS)
            if DECAY:
                store_query_sums(
                    rows, states, d_states, d_cumulated, touched, padded, heads, b * H + group, n, block, V, BK, BV, C
                )
        else:
            dq = tl.zeros((C, BK), tl.float32)
            for h in range(group * GROUP, (group + 1) * GROUP):
                part, rows = query_gradient(
                    q, x, values, w, cumulated, documents, states, d_o, T, H, padded, b, h, n, k,
                    J, K, V, BK, BV, C, STEP, ERASE, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
                )  # fmt: skip
                dq += part
                if DECAY:
                    store_query_sums(
                        rows, states, d_states, d_cumulated, touched, padded, heads, b * H + h, n, block, V, BK, BV, C
                    )
            store_tokens(d_q, b, t, group * K + k, dq, T, H // GROUP * K, C, BK, SUBSTEPS)
    elif ERASE:
        if GROUP == 1:
            db = erase_gradient(
                x, values, w, erase_key, strengths, cumulated, documents, states, d_w, d_strength, d_cumulated,
                T, H, padded, heads, b, group, n, block,
                J, K, V, BK, BV, C, STEP, TIED, STRENGTH, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
            )  # fmt: skip
        else:
            db = tl.zeros((C, BK), tl.float32)
            for h in range(group * GROUP, (group + 1) * GROUP):
                db += erase_gradient(
                    x, values, w, erase_key, strengths, cumulated, documents, states, d_w, d_strength, d_cumulated,
                    T, H, padded, heads, b, h, n, block,
                    J, K, V, BK, BV, C, STEP, TIED, STRENGTH, DECAY, DOCUMENTS, GROUP, SUBSTEPS, PRECISION,
                )  # fmt: skip
        if TIED:
            store_rows(d_x, b, t, group * (J * K) + k, db, C, BK)
        else:
            store_rows(d_erase_key, b, t, group * K + k, db, C, BK)
