"""Backward, the parallel half: every chunk turns dO, its incoming S, its outgoing dS' and dU into its tokens' gradients.

Rows, what each query and each erase looked up (an erase is a query whose answer is fed back: dR = -β ⊙ dU):

    dN_j = dO Y_jᵀ ⊙ Γ        dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ
    dM_j = dR Y_jᵀ ⊙ Γ        dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ        dβ = -⟨B, the same with dU⟩

Columns, what was written:

    dX_j = dN_jᵀ Q + dM_jᵀ B + e^{G_C - G} ⊙ Y_j dS'ᵀ         (where B is X_0, dX_0 takes dB up)
    dW_j = N_jᵀ dO + M_jᵀ dR + e^{G_C - G} ⊙ X_j dS'          for j > 0; dW_0 = dU is known
    dG_i = rows - columns of N_j ⊙ dN_j + M_j ⊙ dM_j, and what the decays at the borders add

One program a chunk and head does the query, then the erase with the column it feeds, then each other column: tiles are
asked for again and found in the cache, and only one accumulator is alive at a time. No product's left factor is ever the
transpose of another product's result: Triton 3.4 to 3.7.0 miscompiles that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, kept, load_gate, load_rows, off_diagonal, store_rows


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
    PRECISION: tl.constexpr,
):
    """The gradient `[C, BK]` of what asked, from the gradient of what was answered, and ⟨asked, its part through S⟩.

    `values` are column 0's, the others' are in `w`."""
    grad = tl.zeros((C, BK), tl.float32)
    gram = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        answered = load_rows(answers, b, t, first_answer + v, C, BV)
        grad = tl.dot(answered, states.load([matrix + v, k]), grad, input_precision=PRECISION)
        written = load_rows(values, b, t, first_value + v, C, BV)
        gram = tl.dot(answered, tl.trans(written), gram, input_precision=PRECISION)
    grad *= from_start[:, None]
    through_state = tl.sum(load_rows(asking, b, t, first_asking + k, C, BK).to(tl.float32) * grad, 1)
    keys = load_rows(x, b, t, h * (J * K) + k, C, BK)
    grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    for j in tl.static_range(1, J):
        gram = tl.zeros((C, C), tl.float32)
        for v in range(0, V, BV):
            answered = load_rows(answers, b, t, first_answer + v, C, BV)
            written = load_rows(w, b, t, (h * J + j) * V + v, C, BV)
            gram = tl.dot(answered, tl.trans(written), gram, input_precision=PRECISION)
        keys = load_rows(x, b, t, (h * J + j) * K + k, C, BK)
        grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    return grad, through_state


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
def written(
    dx,
    j,
    q,
    x,
    values,
    first_value,
    looking,
    first_lookup,
    beta,
    cumulated,
    documents,
    d_o,
    d_states,
    d_w,
    d_x,
    d_cumulated,
    tails,
    place,
    matrix,
    bh,
    b,
    h,
    t,
    k,
    T,
    padded,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    FED: tl.constexpr,
    ERASE: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dX_j, added to `dx`, and dW_j unless column j is FED by the erase."""
    key = (h * J + j) * K
    # Over all value channels: the outgoing state's share, and the gradients of the two grams below.
    through_state = tl.zeros((C, BK), tl.float32)
    d_gram_q = tl.zeros((C, C), tl.float32)
    d_gram_b = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        value = load_rows(values, b, t, first_value + v, C, BV)
        outgoing = d_states.load([matrix + v, k])
        through_state = tl.dot(value, outgoing, through_state, input_precision=PRECISION)
        answered = load_rows(d_o, b, t, h * V + v, C, BV)
        d_gram_q = tl.dot(value, tl.trans(answered), d_gram_q, input_precision=PRECISION)
        if ERASE:
            wanted = load_rows(d_w, b, t, h * (J * V) + v, C, BV)
            d_gram_b = tl.dot(value, tl.trans(wanted), d_gram_b, input_precision=PRECISION)
    _, to_end, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    through_state *= to_end[:, None]
    if DECAY:
        tl.store(tails + place, tl.sum(load_rows(x, b, t, key + k, C, BK).to(tl.float32) * through_state, 1))
    dx += through_state

    # How much the queries saw of this column, N_jᵀ, then the erases, -β ⊙ M_jᵀ.
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, True)
    gram = weights * key_products(x, key, q, h * K, b, t, K, BK, C, PRECISION)
    crossing = gram * d_gram_q
    seen_q = gram.to(x.dtype)
    asked = load_rows(q, b, t, h * K + k, C, BK)
    dx = tl.dot((d_gram_q * weights).to(x.dtype), asked, dx, input_precision=PRECISION)
    if ERASE:
        weights = off_diagonal(weights * -beta[None, :], C)
        gram = weights * key_products(x, key, looking, first_lookup, b, t, K, BK, C, PRECISION)
        crossing += gram * d_gram_b
        seen_b = gram.to(x.dtype)
        lookup = load_rows(looking, b, t, first_lookup + k, C, BK)
        dx = tl.dot((d_gram_b * weights).to(x.dtype), lookup, dx, input_precision=PRECISION)
    store_rows(d_x, b, t, key + k, dx, C, BK)
    if DECAY:
        rows = tl.sum(crossing, 0) - tl.sum(crossing, 1)
        # Over all key channels already: one of the programs that share them counts it.
        tl.store(d_cumulated + place, rows if K == BK else tl.where(k == 0, rows, 0.0))

    if not FED and k == 0:
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
            store_rows(d_w, b, t, first_value + v, dw, C, BV)


@triton.jit(do_not_specialize=["T", "H", "padded"])
def tokens_kernel(
    q,
    x,
    fed,
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
    tails,
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
    """`fed` are Y_0 `[B, T, H, V]`, or w itself without an erase. `d_strength` `[K/BK, B, H, padded]`, `d_cumulated`
    `[J + 2, K/BK, B, H, padded]` (columns, erase, query), `tails` `[J, K/BK, B, H, padded]` and `touched`
    `[K/BK, B, H, chunks]` are partial sums for `decay.py`."""
    BLOCKS: tl.constexpr = K // BK
    chunks = padded // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    n = (pid // BLOCKS) % chunks
    bh = pid // (BLOCKS * chunks)
    heads = tl.num_programs(0) // (BLOCKS * chunks)
    b, h = bh // H, bh % H
    t = n * C
    k = block * BK
    matrix = (bh * chunks + n) * V
    first_value = h * V if ERASE else h * (J * V)
    looking = x if TIED else erase_key
    first_lookup = h * (J * K) if TIED else h * K
    slab = (BLOCKS * heads).to(tl.int64) * padded
    place = (block * heads + bh).to(tl.int64) * padded + t + tl.arange(0, C)
    beta = tl.full((C,), 1.0, tl.float32)
    if STRENGTH:
        beta = load_gate(strengths, bh, t, padded, C)

    from_start, _, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False)
    dq, rows = looked_up(
        q, h * K, d_o, h * V, x, fed, first_value, w, states, matrix, from_start, weights, b, h, t, k,
        J, K, V, BK, BV, C, PRECISION,
    )  # fmt: skip
    store_rows(d_q, b, t, h * K + k, dq, C, BK)
    if DECAY:
        tl.store(d_cumulated + (J + 1) * slab + place, rows)
        product = tl.zeros((BV, BK), tl.float32)  # for the state's own decay: ⟨dS', S⟩
        for v in range(0, V, BV):
            product += states.load([matrix + v, k]).to(tl.float32) * d_states.load([matrix + v, k]).to(tl.float32)
        tl.store(touched + (block * heads + bh) * chunks + n, tl.sum(tl.sum(product, 1), 0))

    dx = tl.zeros((C, BK), tl.float32)
    if ERASE:
        from_start, _, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
        weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False)
        db, rows = looked_up(
            looking, first_lookup, d_w, h * (J * V), x, fed, first_value, w, states, matrix, from_start,
            off_diagonal(weights, C), b, h, t, k, J, K, V, BK, BV, C, PRECISION,
        )  # fmt: skip
        if STRENGTH:
            lookup = load_rows(looking, b, t, first_lookup + k, C, BK).to(tl.float32)
            tl.store(d_strength + place, -tl.sum(lookup * db, 1))
        if DECAY:
            tl.store(d_cumulated + J * slab + place, rows * -beta)
        db *= -beta[:, None]
        if TIED:
            dx = db
        else:
            store_rows(d_erase_key, b, t, h * K + k, db, C, BK)
    for j in tl.static_range(J):
        if ERASE and j == 0:
            written(
                dx, j, q, x, fed, first_value, looking, first_lookup, beta, cumulated, documents, d_o, d_states, d_w, d_x,
                d_cumulated, tails, place, matrix, bh, b, h, t, k, T, padded,
                J, K, V, BK, BV, C, STEP, True, ERASE, DECAY, DOCUMENTS, PRECISION,
            )  # fmt: skip
        else:
            dx = tl.zeros((C, BK), tl.float32)
            written(
                dx, j, q, x, w, (h * J + j) * V, looking, first_lookup, beta, cumulated, documents, d_o, d_states, d_w, d_x,
                d_cumulated, tails, j * slab + place, matrix, bh, b, h, t, k, T, padded,
                J, K, V, BK, BV, C, STEP, False, ERASE, DECAY, DOCUMENTS, PRECISION,
            )  # fmt: skip
