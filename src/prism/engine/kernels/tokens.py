"""Backward, the parallel half: every chunk turns dO, its incoming S, its outgoing dS' and dU into its tokens' gradients.

Rows, what each query and each erase looked up (an erase is a query whose answer is fed back: dR = -β ⊙ dU):

    dN_j = dO Y_jᵀ ⊙ Γ        dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ
    dM_j = dR Y_jᵀ ⊙ Γ        dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ        dβ = -⟨B, the same with dU⟩

Columns, what was written:

    dX_j = dN_jᵀ Q + dM_jᵀ B + e^{G_C - G} ⊙ Y_j dS'ᵀ         (where B is X_0, dX_0 takes dB up)
    dW_j = N_jᵀ dO + M_jᵀ dR + e^{G_C - G} ⊙ X_j dS'          for j > 0; dW_0 = dU is known
    dG_i = rows - columns of N_j ⊙ dN_j + M_j ⊙ dM_j, and what the decays at the borders add

`rows_kernel` does the rows and, where an erase feeds it, column 0; `columns_kernel` does the other columns. A program is one
chunk of one head. Where keys and values fit (RESIDENT) each tile is loaded once and stays on the chip: waiting for loads is
what this pass spends its time on. No product's left factor is ever the transpose of another product's result: Triton 3.4 to
3.7.0 miscompiles that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, kept, load_gate, load_rows, off_diagonal, store_rows


@triton.jit
def rows_of(resident, tensor, b, t, column, C: tl.constexpr, WIDTH: tl.constexpr, RESIDENT: tl.constexpr):
    return resident if RESIDENT else load_rows(tensor, b, t, column, C, WIDTH)


@triton.jit
def looked_up(
    asked,
    answered,
    key,
    value,
    answers,
    first_answer,
    x,
    values,
    first_value,
    w,
    states,
    cumulated,
    documents,
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
    STRICT: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient `[C, BK]` of what asked, from the gradient of what was answered, and ⟨asked, its part through S⟩.

    `key` and `values` are column 0's, the others' are in `x` and `w`."""
    RESIDENT: tl.constexpr = K == BK and V == BV
    grad = tl.zeros((C, BK), tl.float32)
    gram = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        answers_v = rows_of(answered, answers, b, t, first_answer + v, C, BV, RESIDENT)
        grad = tl.dot(answers_v, states.load([matrix + v, k]), grad, input_precision=PRECISION)
        values_v = rows_of(value, values, b, t, first_value + v, C, BV, RESIDENT)
        gram = tl.dot(answers_v, tl.trans(values_v), gram, input_precision=PRECISION)
    from_start, _, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    grad *= from_start[:, None]
    through_state = tl.sum(asked.to(tl.float32) * grad, 1)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False)
    if STRICT:
        weights = off_diagonal(weights, C)
    grad = tl.dot((gram * weights).to(x.dtype), key, grad, input_precision=PRECISION)
    for j in tl.static_range(1, J):
        gram = tl.zeros((C, C), tl.float32)
        for v in range(0, V, BV):
            answers_v = rows_of(answered, answers, b, t, first_answer + v, C, BV, RESIDENT)
            values_v = load_rows(w, b, t, (h * J + j) * V + v, C, BV)
            gram = tl.dot(answers_v, tl.trans(values_v), gram, input_precision=PRECISION)
        keys = load_rows(x, b, t, (h * J + j) * K + k, C, BK)
        grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    return grad, through_state


@triton.jit
def key_products(
    own,
    x,
    first_key,
    asked,
    asking,
    first_asking,
    b,
    t,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X_j Qᵀ, or X_j Bᵀ, over all key channels."""
    gram = tl.zeros((C, C), tl.float32)
    for c in range(0, K, BK):
        keys = rows_of(own, x, b, t, first_key + c, C, BK, RESIDENT)
        askers = rows_of(asked, asking, b, t, first_asking + c, C, BK, RESIDENT)
        gram = tl.dot(keys, tl.trans(askers), gram, input_precision=PRECISION)
    return gram


@triton.jit
def written(
    value,
    answered,
    wanted,
    own,
    asked,
    lookup,
    j,
    q,
    x,
    values,
    first_value,
    looking,
    first_lookup,
    strengths,
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
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dX_j (without dB), stored with dW_j unless column j is FED by the erase.

    Where tiles are RESIDENT they are given; a column that is not FED brings its three keys in only when its values are
    done with, so that two programs fit on a multiprocessor."""
    RESIDENT: tl.constexpr = K == BK and V == BV
    key = (h * J + j) * K
    # Over all value channels: the outgoing state's share, and the gradients of the two grams below.
    through_state = tl.zeros((C, BK), tl.float32)
    d_gram_q = tl.zeros((C, C), tl.float32)
    d_gram_b = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        values_v = rows_of(value, values, b, t, first_value + v, C, BV, RESIDENT)
        through_state = tl.dot(values_v, d_states.load([matrix + v, k]), through_state, input_precision=PRECISION)
        answers = rows_of(answered, d_o, b, t, h * V + v, C, BV, RESIDENT)
        d_gram_q = tl.dot(values_v, tl.trans(answers), d_gram_q, input_precision=PRECISION)
        if ERASE:
            wants = rows_of(wanted, d_w, b, t, h * (J * V) + v, C, BV, RESIDENT)
            d_gram_b = tl.dot(values_v, tl.trans(wants), d_gram_b, input_precision=PRECISION)
    if RESIDENT:
        asked = load_rows(q, b, t, h * K, C, BK)
        if not FED:
            own = load_rows(x, b, t, key, C, BK)
            if ERASE:
                lookup = load_rows(looking, b, t, first_lookup, C, BK)
    _, to_end, _ = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    through_state *= to_end[:, None]
    if DECAY:
        keys = rows_of(own, x, b, t, key + k, C, BK, RESIDENT)
        tl.store(tails + place, tl.sum(keys.to(tl.float32) * through_state, 1))
    dx = through_state

    # How much the queries saw of this column, N_jᵀ, then the erases, -β ⊙ M_jᵀ.
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, True)
    gram = key_products(own, x, key, asked, q, h * K, b, t, K, BK, C, RESIDENT, PRECISION)
    d_gram_q *= weights
    crossing = gram * d_gram_q
    if not FED:
        seen_q = (gram * weights).to(x.dtype)
    askers = rows_of(asked, q, b, t, h * K + k, C, BK, RESIDENT)
    dx = tl.dot(d_gram_q.to(x.dtype), askers, dx, input_precision=PRECISION)
    if ERASE:
        if STRENGTH:
            weights *= load_gate(strengths, bh, t, padded, C)[None, :]
        weights = off_diagonal(-weights, C)
        gram = key_products(own, x, key, lookup, looking, first_lookup, b, t, K, BK, C, RESIDENT, PRECISION)
        d_gram_b *= weights
        crossing += gram * d_gram_b
        if not FED:
            seen_b = (gram * weights).to(x.dtype)
        lookups = rows_of(lookup, looking, b, t, first_lookup + k, C, BK, RESIDENT)
        dx = tl.dot(d_gram_b.to(x.dtype), lookups, dx, input_precision=PRECISION)
    if not FED:
        store_rows(d_x, b, t, key + k, dx, C, BK)
    if DECAY:
        rows = tl.sum(crossing, 0) - tl.sum(crossing, 1)
        # Over all key channels already: one of the programs that share them counts it.
        tl.store(d_cumulated + place, rows if K == BK else tl.where(k == 0, rows, 0.0))

    if not FED and k == 0:
        keys = rows_of(own, x, b, t, key, C, BK, RESIDENT)
        for v in range(0, V, BV):
            dw = tl.dot(keys, tl.trans(d_states.load([matrix + v, 0])), input_precision=PRECISION)
            for c in tl.static_range(BK, K, BK):
                outgoing = tl.trans(d_states.load([matrix + v, c]))
                dw = tl.dot(load_rows(x, b, t, key + c, C, BK), outgoing, dw, input_precision=PRECISION)
            dw *= to_end[:, None]
            answers = rows_of(answered, d_o, b, t, h * V + v, C, BV, RESIDENT)
            dw = tl.dot(seen_q, answers, dw, input_precision=PRECISION)
            if ERASE:
                wants = rows_of(wanted, d_w, b, t, h * (J * V) + v, C, BV, RESIDENT)
                dw = tl.dot(seen_b, wants, dw, input_precision=PRECISION)
            store_rows(d_w, b, t, first_value + v, dw, C, BV)
    return dx


@triton.jit(do_not_specialize=["T", "H", "padded"])
def rows_kernel(
    q,
    x,
    fed,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
    states,
    all_states,
    d_o,
    d_states,
    all_d_states,
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
    """`fed` are Y_0 `[B, T, H, V]`, or w itself without an erase; `all_states` are the tensors behind the tiles. `d_strength` `[K/BK, B, H, padded]`, `d_cumulated`
    `[J + 2, K/BK, B, H, padded]` (columns, erase, query), `tails` `[J, K/BK, B, H, padded]` and `touched`
    `[K/BK, B, H, chunks]` are partial sums for `decay.py`."""
    BLOCKS: tl.constexpr = K // BK
    RESIDENT: tl.constexpr = K == BK and V == BV
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

    if DECAY:  # the state's own decay: ⟨dS', S⟩, over this program's share of the matrix
        SHARE: tl.constexpr = V * BK
        first = matrix.to(tl.int64) * K + block * SHARE + tl.arange(0, 1024 if SHARE > 1024 else SHARE)
        product = tl.zeros((1024 if SHARE > 1024 else SHARE,), tl.float32)
        for i in range(0, SHARE, 1024):
            product += tl.load(all_states + first + i).to(tl.float32) * tl.load(all_d_states + first + i).to(tl.float32)
        tl.store(touched + (block * heads + bh) * chunks + n, tl.sum(product, 0))

    answered = load_rows(d_o, b, t, h * V, C, BV) if RESIDENT else 0
    asked = load_rows(q, b, t, h * K + k, C, BK)
    key = load_rows(x, b, t, h * (J * K) + k, C, BK)
    value = load_rows(fed, b, t, first_value, C, BV) if RESIDENT else 0
    dq, rows = looked_up(
        asked, answered, key, value, d_o, h * V, x, fed, first_value, w, states, cumulated, documents, matrix, bh, b, h, t, k,
        T, padded, J, K, V, BK, BV, C, STEP, False, DECAY, DOCUMENTS, PRECISION,
    )  # fmt: skip
    store_rows(d_q, b, t, h * K + k, dq, C, BK)
    if DECAY:
        tl.store(d_cumulated + (J + 1) * slab + place, rows)

    if ERASE:
        wanted = load_rows(d_w, b, t, h * (J * V), C, BV) if RESIDENT else 0
        lookup = key if TIED else load_rows(erase_key, b, t, h * K + k, C, BK)
        dx = written(
            value, answered, wanted, key, asked, lookup, 0, q, x, fed, first_value, looking, first_lookup,
            strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails, place, matrix, bh, b, h, t, k, T,
            padded, J, K, V, BK, BV, C, STEP, True, ERASE, STRENGTH, DECAY, DOCUMENTS, PRECISION,
        )  # fmt: skip
        if not TIED:
            store_rows(d_x, b, t, h * (J * K) + k, dx, C, BK)
        db, rows = looked_up(
            lookup, wanted, key, value, d_w, h * (J * V), x, fed, first_value, w, states, cumulated, documents, matrix, bh, b,
            h, t, k, T, padded, J, K, V, BK, BV, C, STEP, True, DECAY, DOCUMENTS, PRECISION,
        )  # fmt: skip
        beta = tl.full((C,), 1.0, tl.float32)
        if STRENGTH:
            beta = load_gate(strengths, bh, t, padded, C)
            tl.store(d_strength + place, -tl.sum(lookup.to(tl.float32) * db, 1))
        if DECAY:
            tl.store(d_cumulated + J * slab + place, rows * -beta)
        db *= -beta[:, None]
        if TIED:
            store_rows(d_x, b, t, h * (J * K) + k, dx + db, C, BK)
        else:
            store_rows(d_erase_key, b, t, h * K + k, db, C, BK)


@triton.jit(do_not_specialize=["T", "H", "padded"])
def columns_kernel(
    q,
    x,
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
    """Columns that no erase feeds, one program each; those of a chunk run next to one another and share the L2 cache."""
    BLOCKS: tl.constexpr = K // BK
    FIRST: tl.constexpr = 1 if ERASE else 0
    COLUMNS: tl.constexpr = J - FIRST
    RESIDENT: tl.constexpr = K == BK and V == BV
    chunks = padded // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    j = FIRST + (pid // BLOCKS) % COLUMNS
    n = (pid // (BLOCKS * COLUMNS)) % chunks
    bh = pid // (BLOCKS * COLUMNS * chunks)
    heads = tl.num_programs(0) // (BLOCKS * COLUMNS * chunks)
    b, h = bh // H, bh % H
    t = n * C
    k = block * BK
    first_value = (h * J + j) * V
    looking = x if TIED else erase_key
    first_lookup = h * (J * K) if TIED else h * K
    place = ((j * BLOCKS + block) * heads + bh).to(tl.int64) * padded + t + tl.arange(0, C)
    value = load_rows(w, b, t, first_value, C, BV) if RESIDENT else 0
    answered = load_rows(d_o, b, t, h * V, C, BV) if RESIDENT else 0
    wanted = load_rows(d_w, b, t, h * (J * V), C, BV) if RESIDENT and ERASE else 0
    written(
        value, answered, wanted, 0, 0, 0, j, q, x, w, first_value, looking,
        first_lookup, strengths, cumulated, documents, d_o, d_states, d_w, d_x, d_cumulated, tails, place,
        (bh * chunks + n) * V, bh, b, h, t, k, T, padded,
        J, K, V, BK, BV, C, STEP, False, ERASE, STRENGTH, DECAY, DOCUMENTS, PRECISION,
    )  # fmt: skip
