"""Backward, the parallel half, rows: what each query and each erase looked up. One program a chunk and head.

    dN_j = dO Y_jᵀ ⊙ Γ        dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ
    dM_j = dR Y_jᵀ ⊙ Γ        dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ        dR = -β ⊙ dU        dβ = -⟨B, the same with dU⟩

An erase is a query whose answer is fed back: one function serves both, one after the other, so that only one accumulator
is alive. No product's left factor is ever the transpose of another product's result (here and in `writes.py`): Triton 3.4
to 3.7.0 miscompiles that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders, kept, load_gate, load_rows, off_diagonal, store_rows


@triton.jit
def looked_up(
    answers,
    first_answer,
    x,
    w,
    fed,
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
    ERASE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient `[C, BK]` of what asked, from the gradient of what was answered: its part through S, and all of it."""
    grad = tl.zeros((C, BK), tl.float32)
    for v in range(0, V, BV):
        answered = load_rows(answers, b, t, first_answer + v, C, BV)
        grad = tl.dot(answered, states.load([matrix + v, k]), grad, input_precision=PRECISION)
    grad *= from_start[:, None]
    through_state = grad
    for j in tl.static_range(J):
        gram = tl.zeros((C, C), tl.float32)
        for v in range(0, V, BV):
            if ERASE and j == 0:
                values = load_rows(fed, b, t, h * V + v, C, BV)
            else:
                values = load_rows(w, b, t, (h * J + j) * V + v, C, BV)
            answered = load_rows(answers, b, t, first_answer + v, C, BV)
            gram = tl.dot(answered, tl.trans(values), gram, input_precision=PRECISION)
        keys = load_rows(x, b, t, (h * J + j) * K + k, C, BK)
        grad = tl.dot((gram * weights).to(x.dtype), keys, grad, input_precision=PRECISION)
    return through_state, grad


@triton.jit(do_not_specialize=["T", "H", "padded"])
def lookups_kernel(
    q,
    x,
    w,
    erase_key,
    strengths,
    cumulated,
    documents,
    states,
    fed,
    d_o,
    d_states,
    d_w,
    d_q,
    d_x,
    d_erase_key,
    d_strength,
    d_log_decay,
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
    """dB goes to `d_erase_key`, or into column 0 of `d_x`, where `writes.py` adds to it. `d_strength` `[K/BK, B, T, H]` and
    `d_log_decay` `[1 + J, K/BK, B, T, H]` are partial sums; this kernel writes the latter's first slab."""
    BLOCKS: tl.constexpr = K // BK
    chunks = padded // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    n = (pid // BLOCKS) % chunks
    bh = pid // (BLOCKS * chunks)
    b, h = bh // H, bh % H
    batch = tl.num_programs(0) // (BLOCKS * chunks) // H
    t = n * C
    k = block * BK
    matrix = (bh * chunks + n) * V

    from_start, _, carried = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS)
    weights = kept(cumulated, documents, bh, b, t, padded, T, C, STEP, DECAY, DOCUMENTS, False)
    rows = tl.zeros((C,), tl.float32)

    through_state, dq = looked_up(
        d_o, h * V, x, w, fed, states, matrix, from_start, weights, b, h, t, k, J, K, V, BK, BV, C, ERASE, PRECISION
    )
    store_rows(d_q, b, t, h * K + k, dq, C, BK)
    if DECAY:
        rows += tl.sum(load_rows(q, b, t, h * K + k, C, BK).to(tl.float32) * through_state, 1)

    place = ((block * batch + b).to(tl.int64) * T + t + tl.arange(0, C)) * H + h
    inside = t + tl.arange(0, C) < T
    if ERASE:
        strict = off_diagonal(weights, C)
        through_state, db = looked_up(
            d_w, h * (J * V), x, w, fed, states, matrix, from_start, strict, b, h, t, k, J, K, V, BK, BV, C, ERASE, PRECISION
        )
        if TIED:
            lookup = load_rows(x, b, t, h * (J * K) + k, C, BK).to(tl.float32)
        else:
            lookup = load_rows(erase_key, b, t, h * K + k, C, BK).to(tl.float32)
        beta = tl.full((C,), 1.0, tl.float32)
        if STRENGTH:
            beta = load_gate(strengths, bh, t, padded, C)
            tl.store(d_strength + place, -tl.sum(lookup * db, 1), mask=inside)
        if DECAY:
            rows -= beta * tl.sum(lookup * through_state, 1)
        db *= -beta[:, None]
        if TIED:
            store_rows(d_x, b, t, h * (J * K) + k, db, C, BK)
        else:
            store_rows(d_erase_key, b, t, h * K + k, db, C, BK)

    if DECAY:
        touched = 0.0  # the state's own decay: ⟨dS', S⟩
        for v in range(0, V, BV):
            product = states.load([matrix + v, k]).to(tl.float32) * d_states.load([matrix + v, k]).to(tl.float32)
            touched += tl.sum(tl.sum(product, 1), 0)
        dg = tl.cumsum(rows, 0, reverse=True) + touched * carried
        tl.store(d_log_decay + place, dg, mask=inside)
