"""Backward, the parallel half, rows: what each query and each erase looked up. One program a chunk, head and side.

    dN_j = dO Y_jᵀ ⊙ Γ        dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ
    dM_j = dR Y_jᵀ ⊙ Γ        dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ        dR = -β ⊙ dU        dβ = -⟨B, the same with dU⟩

An erase is a query whose answer is fed back: one function serves both, in programs that run next to one another and find
each other's tiles in the L2 cache. Gates only ever multiply rows of Q and B by e^G and rows of X_j by e^-G, so that

    dG_i = ⟨q_i, dq_i⟩ + ⟨b_i, db_i⟩ - Σ_j ⟨x_ij, dx_ij⟩        (dB and dX_0 taken apart even where B is X_0)

and no C × C matrix is needed for it (`writes.py` has the second half). No product's left factor is ever the transpose of
another product's result (here and in `writes.py`): Triton 3.4 to 3.7.0 miscompiles that on Hopper.
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
    """The gradient `[C, BK]` of what asked, from the gradient of what was answered, and ⟨asked, gradient⟩ `[C]`.

    `values` are column 0's, the others' are in `w`. APART: the product without what a query sees of its own token's writes.
    No gate touches that; it would only be the difference of two large numbers later (`writes.py` leaves it out too)."""
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
def lookups_kernel(
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
    where `writes.py` adds to it. `d_strength` is `[K/BK, B, T, H]`; partial sums are described in `decay.py`."""
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
        # β goes in before the product is rounded, as in `writes.py`: the two halves of dG cancel only what was rounded alike.
        # Where it is too small to be divided out of dβ again it goes in later: what does not cancel is then as small.
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
