"""Gradients of queries, keys, lookups, strengths and decays of a memory with a decay per key channel, all chunks in parallel.

With b' = -β b, the erase's lookup, and row gates E (the sums before the row) in place of G for what reads before the decay:

    dN_j = dO Y_jᵀ          dq = e^G ⊙ dO Sᵀ + Σ_j (dN_j spread over the gated rows of X_j)
    dP_j = dU Y_jᵀ          db' the same with dU and dP_j             dβ = -⟨b, db'⟩         db = -β db'
                            dx_j = e^{G_C - G} ⊙ Y_j dS'ᵀ + dN_jᵀ, dP_jᵀ spread over the gated rows of Q, B'

Spreading is the halving of `channel_prepare.py` the other way round: for each h, the corners of a C × C gradient times the
rows on the other side, gated from the middle, and then gated from the middle again.

A gate multiplies rows of Q and B' by e^G and rows of X_j by e^-G, so dG = q ⊙ dq + b' ⊙ db' - Σ_j x_j ⊙ dx_j in every channel.
Each h adds its own part, from the same rounded factors on both sides: a pair of rows then contributes equally to both, and
cancels exactly in the sum over all gates that do not lie between the two. Pairs without a gate between them stay out.

No product's left factor is the transpose of another product's result: Triton 3.4 to 3.7.0 miscompiles that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.memory.channel_prepare import (
    document_ends,
    from_middle,
    in_corner,
    load_before,
    load_strength,
    visible,
)
from prism.engine.kernels.memory.tiles import diagonal, load_rows, store_rows


@triton.jit
def looked_up(
    asking,
    key,
    answers,
    first_answer,
    values,
    first_value,
    states,
    matrix,
    own,
    first,
    documents,
    dx,
    rows,
    earlier,
    b,
    t,
    k,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    STATE: tl.constexpr,
    EXCLUSIVE: tl.constexpr,
    STRICT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One column's part of the gradient of a query or lookup, `asking` `[C, BK]`, from the gradient of its answer; and dx,
    dG (`rows`) and dE (`earlier`) with this part added. STATE: with the incoming state's part. EXCLUSIVE: it reads before its
    row's decay. STRICT: it does not see its own token's write."""
    d_seen = tl.zeros((C, C), tl.float32)
    turned = tl.zeros((C, C), tl.float32)
    d_asking = tl.zeros((C, BK), tl.float32)
    for v in range(0, V, BV):
        answered = load_rows(answers, b, t, first_answer + v, C, BV)
        written = load_rows(values, b, t, first_value + v, C, BV)
        d_seen = tl.dot(answered, tl.trans(written), d_seen, input_precision=PRECISION)
        turned = tl.dot(written, tl.trans(answered), turned, input_precision=PRECISION)
        if STATE:
            d_asking = tl.dot(answered, states.load([matrix + v, k]), d_asking, input_precision=PRECISION)
    G = tl.load(own[None, :] + tl.arange(0, C)[:, None] * K)
    E = load_before(own, C, K) if EXCLUSIVE else G
    if STATE:
        d_asking *= tl.exp2(E.to(tl.float32)) * first[:, None]
        if EXCLUSIVE:
            earlier += asking * d_asking
        else:
            rows += asking * d_asking
    if not STRICT:
        same_token = diagonal(d_seen, C)[:, None]
        d_asking += same_token * key
        dx += same_token * asking
    d_seen = visible(d_seen, documents, b, t, T, C, DOCUMENTS).to(states.dtype)
    turned = visible(turned, documents, b, t, T, C, DOCUMENTS).to(states.dtype)
    if EXCLUSIVE:  # the row before has no gate either
        i = tl.arange(0, C)
        lower, upper = i[:, None] == i[None, :] + 1, i[:, None] + 1 == i[None, :]
        next_to = tl.where(lower, d_seen, tl.zeros_like(d_seen))
        d_asking = tl.dot(next_to, key.to(states.dtype), d_asking, input_precision=PRECISION)
        next_to = tl.where(upper, turned, tl.zeros_like(turned))
        dx = tl.dot(next_to, asking.to(states.dtype), dx, input_precision=PRECISION)
        d_seen = tl.where(lower, tl.zeros_like(d_seen), d_seen)
        turned = tl.where(upper, tl.zeros_like(turned), turned)
    for l in tl.range(0, LEVELS, num_stages=1):  # unrolled, it would hold the gates of all levels in registers
        near = from_middle(G, own, l, C, K)
        gate = from_middle(E, own, l, C, K) if EXCLUSIVE else near
        gated = (key * near).to(states.dtype)
        gated_asking = (asking * gate).to(states.dtype)
        spread = tl.dot(in_corner(d_seen, l, C, False), gated, input_precision=PRECISION)
        d_asking += gate * spread
        if EXCLUSIVE:
            earlier += gated_asking.to(tl.float32) * spread
        else:
            rows += gated_asking.to(tl.float32) * spread
        spread = tl.dot(in_corner(turned, l, C, True), gated_asking, input_precision=PRECISION)
        dx += near * spread
        rows -= gated.to(tl.float32) * spread
    return d_asking, dx, rows, earlier


@triton.jit(do_not_specialize=["T", "H", "padded"])
def channel_tokens_kernel(
    q,
    x,
    fed,
    w,
    erase_key,
    strength,
    cumulated,
    documents,
    states,
    d_o,
    d_states,
    d_w,
    ends,
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
    R: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    BEFORE: tl.constexpr,
    UNDECAYED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ENDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per chunk, BK key channels, and R heads that share q, x and `erase_key`. `fed` is Y_0 `[B, T, H, V]`, None
    without an erase; `ends` ⟨S, dS'⟩ per channel of the first and the last chunk, `[2, B, H, K]`; `d_strength`
    `[J, K/BK, B, T, H]` partial sums; `d_log_decay` `[B, T, H, K]`."""
    BLOCKS: tl.constexpr = K // BK
    chunks = padded // C
    pid = tl.program_id(0)
    block = pid % BLOCKS
    n = (pid // BLOCKS) % chunks
    groups = H // R
    b = pid // (BLOCKS * chunks) // groups
    group = pid // (BLOCKS * chunks) % groups
    batch = tl.num_programs(0) // (BLOCKS * chunks * groups)
    t = n * C
    k = block * BK
    i = tl.arange(0, C)
    channels = k + tl.arange(0, BK)
    first, final, carried = document_ends(documents, b, t, T, C, DOCUMENTS)
    query = load_rows(q, b, t, group * K + k, C, BK).to(tl.float32)
    dq = tl.zeros((C, BK), tl.float32)
    db = tl.zeros((C, BK), tl.float32)

    for back in tl.static_range(J):  # column 0 last: where B is X_0, the whole of dB is added to dX_0
        key = load_rows(x, b, t, (group * J + J - 1 - back) * K + k, C, BK).to(tl.float32)
        if ERASE:
            if TIED and back == J - 1:
                direction = key
            elif TIED:
                direction = load_rows(x, b, t, group * (J * K) + k, C, BK).to(tl.float32)
            else:
                direction = load_rows(erase_key, b, t, group * K + k, C, BK).to(tl.float32)
        dx = tl.zeros((C, BK), tl.float32)
        for r in range(R):
            h = group * R + r
            bh = b * H + h
            matrix = (bh * chunks + n) * V
            own = cumulated + (bh.to(tl.int64) * padded + t) * K + channels
            rows = tl.zeros((C, BK), tl.float32)  # dG
            earlier = tl.zeros((C, BK), tl.float32)  # dE, of rows that read before their own decay
            values = fed if ERASE and back == J - 1 else w
            value = h * V if ERASE and back == J - 1 else (h * J + J - 1 - back) * V
            d_asking, dx, rows, earlier = looked_up(
                query, key, d_o, h * V, values, value, states, matrix, own, first, documents, dx, rows, earlier,
                b, t, k, T, K, V, BK, BV, C, LEVELS, back == 0, BEFORE, BEFORE, DOCUMENTS, PRECISION,
            )  # fmt: skip
            dq += d_asking
            if R == 1 and back == J - 1:  # stored before the erase needs the registers
                store_rows(d_q, b, t, group * K + k, dq, C, BK)
            if ERASE:
                scale = load_strength(strength, b, t, h, T, H, C, STRENGTH)
                d_lookup, dx, rows, earlier = looked_up(
                    direction * scale[:, None], key, d_w, h * (J * V), values, value, states, matrix, own, first,
                    documents, dx, rows, earlier,
                    b, t, k, T, K, V, BK, BV, C, LEVELS, back == 0, UNDECAYED, True, DOCUMENTS, PRECISION,
                )  # fmt: skip
                db += d_lookup * scale[:, None]
                if STRENGTH:
                    slot = ((J - 1 - back) * BLOCKS + block) * batch + b
                    at = (slot.to(tl.int64) * T + t + i) * H + h
                    tl.store(d_strength + at, -tl.sum(direction * d_lookup, 1), mask=t + i < T)

            # The outgoing state's part of dX_j, and ⟨S, dS'⟩ for the state's own decay.
            outgoing = tl.zeros((C, BK), tl.float32)
            touched = tl.zeros((BK,), tl.float32)
            for v in range(0, V, BV):
                d_state = d_states.load([matrix + v, k])
                outgoing = tl.dot(
                    load_rows(values, b, t, value + v, C, BV), d_state, outgoing, input_precision=PRECISION
                )
                if back == 0:
                    touched += tl.sum(states.load([matrix + v, k]).to(tl.float32) * d_state.to(tl.float32), 0)
            last = tl.load(own + (C - 1) * K)
            G = tl.load(own[None, :] + i[:, None] * K)
            outgoing *= tl.exp2((last[None, :] - G).to(tl.float32)) * final[:, None]
            dx += outgoing
            tail = key * outgoing

            # dg_t collects dG of the rows from t on, dE of those after t, tails of those before t, and the state's own decay.
            dg = tl.cumsum(rows + earlier, 0, reverse=True) - earlier + tl.cumsum(tail, 0) - tail
            to = d_log_decay + ((b.to(tl.int64) * T + t + i) * H + h)[:, None] * K + channels[None, :]
            inside = (t + i < T)[:, None]
            if back == 0:
                if ENDS:
                    place = ends + bh.to(tl.int64) * K + channels
                    touched = tl.where(n == 0, tl.load(place), touched)
                    touched = tl.where(n == chunks - 1, tl.load(place + (batch * H).to(tl.int64) * K), touched)
                dg += (touched * tl.exp2(last.to(tl.float32)) * carried)[None, :]
            else:
                tl.debug_barrier()  # other threads may have stored what this one loads
                dg += tl.load(to, mask=inside, other=0.0)
            tl.store(to, dg, mask=inside)

        if TIED and ERASE and back == J - 1:
            dx += db
        store_rows(d_x, b, t, (group * J + J - 1 - back) * K + k, dx, C, BK)
    if R > 1:
        store_rows(d_q, b, t, group * K + k, dq, C, BK)
    if ERASE and not TIED:
        store_rows(d_erase_key, b, t, group * K + k, db, C, BK)
