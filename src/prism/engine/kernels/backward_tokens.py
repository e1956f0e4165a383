"""Backward kernels over the tokens, all chunks in parallel: gradients of queries, keys, values and strengths.

**Queries** (one program per chunk, head and side): the gradients of each query and of each erase's lookup.

    dN_j = dO Y_jᵀ ⊙ Γ        dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ
    dM_j = dR Y_jᵀ ⊙ Γ        dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ        dR = -β ⊙ dU        dβ = -⟨B, the same with dU⟩

An erase is a query whose answer is fed back. One function serves both, in neighbouring programs that find each other's tiles
in the L2 cache. Gates only multiply rows of Q and B by e^G and rows of X_j by e^-G, so that

    dG_i = ⟨q_i, dq_i⟩ + ⟨b_i, db_i⟩ - Σ_j ⟨x_ij, dx_ij⟩        (dB and dX_0 taken separately even where B is X_0)

and dG needs no C × C matrix.

**Writes** (one program per chunk, head and column):

    dX_j = dN_jᵀ Q + dM_jᵀ B + e^{G_C - G} ⊙ Y_j dS'ᵀ         (where B is X_0, dB is added to dX_0)
    dW_j = N_jᵀ dO + M_jᵀ dR + e^{G_C - G} ⊙ X_j dS'          for j > 0; dW_0 = dU is known

No product's left factor is the transpose of another product's result: Triton 3.4 to 3.7.0 miscompiles that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, diagonal, kept, load_gate, load_rows, off_diagonal, store_rows


@triton.jit
def looked_up(
    asking,
    first_asking,
    answers,
    first_answer,
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
    t,
    k,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    APART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient `[C, BK]` of a query or lookup, from the gradient of its answer, and ⟨query, gradient⟩ `[C]`.

    `values` are those of column 0, the others are in `w`. APART: the inner product leaves out what a query sees of its own
    token's writes. No gate multiplies that part; later it would only be the difference of two large numbers
    (`column_gradients` leaves it out too)."""
    grad = tl.zeros((C, BK), tl.float32)
    gram = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        answered = load_rows(answers, b, t, first_answer + v, C, BV)
        grad = tl.dot(answered, states.load([matrix + v, k]), grad, input_precision=PRECISION)
        written = load_rows(values, b, t, first_value + v, C, BV)
        gram = tl.dot(answered, tl.trans(written), gram, input_precision=PRECISION)
    grad *= from_start[:, None]
    keys = load_rows(x, b, t, h * (J * K) + k, C, BK)
    if APART:
        own = diagonal(gram, C)[:, None] * keys.to(tl.float32)
        weights = off_diagonal(weights, C)
    grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    for j in tl.static_range(1, J):
        gram = tl.zeros((C, C), tl.float32)
        for v in range(0, V, BV):
            answered = load_rows(answers, b, t, first_answer + v, C, BV)
            written = load_rows(w, b, t, (h * J + j) * V + v, C, BV)
            gram = tl.dot(answered, tl.trans(written), gram, input_precision=PRECISION)
        keys = load_rows(x, b, t, (h * J + j) * K + k, C, BK)
        if APART:
            own += diagonal(gram, C)[:, None] * keys.to(tl.float32)
        grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    along = tl.sum(load_rows(asking, b, t, first_asking + k, C, BK).to(tl.float32) * grad, 1)
    if APART:
        grad += own
    return grad, along


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
    n = (pid // (SIDES * BLOCKS)) % chunks
    bh = pid // (SIDES * BLOCKS * chunks)
    b, h = bh // H, bh % H
    t = n * C
    k = block * BK
    matrix = (bh * chunks + n) * V
    heads = tl.num_programs(0) // (SIDES * BLOCKS * chunks)
    place = (block * heads + bh).to(tl.int64) * padded + t + tl.arange(0, C)
    value = h * V if ERASE else h * (J * V)
    from_start, _, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False)

    if side == 0:
        dq, rows = looked_up(
            q, h * K, d_o, h * V, x, values, value, w, states, matrix, from_start, weights, b, h, t, k,
            J, K, V, BK, BV, C, PRECISION == "ieee", PRECISION,
        )  # fmt: skip
        store_rows(d_q, b, t, h * K + k, dq, C, BK)
        if DECAY:
            tl.store(d_cumulated + place, rows)
            product = tl.zeros((BV, BK), tl.float32)  # for the state's own decay: ⟨dS', S⟩
            for v in range(0, V, BV):
                product += states.load([matrix + v, k]).to(tl.float32) * d_states.load([matrix + v, k]).to(tl.float32)
            tl.store(touched + (block * heads + bh) * chunks + n, tl.sum(tl.sum(product, 1), 0))
    elif ERASE:
        looking = x if TIED else erase_key
        first = h * (J * K) if TIED else h * K
        # β multiplies before the product is rounded, as in `column_gradients`: the two halves of dG cancel only if both were
        # rounded in the same way. Where β is too small to be divided out of dβ again, it multiplies later: what does not
        # cancel is then equally small.
        beta = tl.full((C,), 1.0, tl.float32)
        if STRENGTH:
            beta = load_gate(strengths, bh, t, padded, C)
        early = tl.where(tl.abs(beta) < 0.0625, 1.0, beta)
        db, rows = looked_up(
            looking, first, d_w, h * (J * V), x, values, value, w, states, matrix, from_start * -early,
            off_diagonal(weights * -early[:, None], C), b, h, t, k, J, K, V, BK, BV, C, False, PRECISION,
        )  # fmt: skip
        late = beta / early
        if STRENGTH:
            i = t + tl.arange(0, C)
            at = ((block * (heads // H) + b).to(tl.int64) * T + i) * H + h
            tl.store(d_strength + at, rows / early, mask=i < T)
        db *= late[:, None]
        if TIED:
            store_rows(d_x, b, t, h * (J * K) + k, db, C, BK)
        else:
            store_rows(d_erase_key, b, t, h * K + k, db, C, BK)
        if DECAY:
            tl.store(d_cumulated + (BLOCKS * heads).to(tl.int64) * padded + place, rows * late)


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
    """The gradients of one column. FED: column 0, which the erase feeds (`values` are Y_0). For any other column `values` are
    w, and dW_j is computed too."""
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

    # Over all value channels: the outgoing state's part of dX_j, and the gradients of the two grams below.
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
    if PRECISION == "ieee":  # as in `looked_up`
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
        if BK <= 64:  # loaded again: not keeping the keys in registers lets a third program fit on a multiprocessor
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
    PRECISION: tl.constexpr,
):
    """`fed` is Y_0 `[B, T, H, V]`, None without an erase. `backward_decay_kernel` describes the partial sums."""
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
