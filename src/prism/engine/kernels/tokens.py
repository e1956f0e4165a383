"""Backward, the parallel half: every chunk turns dO, its incoming S, its outgoing dS' and dU into its tokens' gradients.

    dN_j = dO Y_jᵀ ⊙ Γ        dM_j = dR Y_jᵀ ⊙ Γ (strict), dR = -β ⊙ dU
    dQ = Σ_j dN_j X_j + e^G ⊙ dO Sᵀ                 dB = Σ_j dM_j X_j + e^G ⊙ dR Sᵀ                 dβ = ⟨B, dB⟩ / β
    dX_j = dN_jᵀ Q + dM_jᵀ B + e^{G_C - G} ⊙ Y_j dS'ᵀ         (B is X_0: dX_0 takes dB up)
    dW_j = N_jᵀ dO + M_jᵀ dR + e^{G_C - G} ⊙ X_j dS'          for j > 0; dW_0 = dU
    dG_i = rows - columns of Σ_j (N_j ⊙ dN_j + M_j ⊙ dM_j), and what the three decays at the borders add

Every transposed product is computed as a product of its own (X Qᵀ instead of the transpose of Q Xᵀ): Triton 3.4 to 3.7.0
miscompiles a product whose left factor is the transpose of another product's result on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import (
    borders,
    kept,
    live_rows,
    load_state,
    load_tile,
    off_diagonal,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "H", "chunks"])
def tokens_kernel(
    q,
    x,
    w,
    erase_key,
    strength,
    cumulated,
    documents,
    mask,
    states,
    fed,
    d_o,
    d_states,
    d_q,
    d_x,
    d_w,
    d_erase_key,
    d_strength,
    d_log_decay,
    T,
    H,
    chunks,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    ERASE: tl.constexpr,
    TIED: tl.constexpr,
    STRENGTH: tl.constexpr,
    DECAY: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a chunk, head and BK key channels. `d_strength`, `d_log_decay` `[K / BK, B, T, H]` are partial sums."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    block = pid % BLOCKS
    n = (pid // BLOCKS) % chunks
    bh = pid // (BLOCKS * chunks)
    b, h = bh // H, bh % H

    i = tl.arange(0, C)
    ks = block * BK + tl.arange(0, BK)
    KEYS: tl.constexpr = K % BK == 0
    VALUES: tl.constexpr = V % BV == 0
    dtype = x.dtype.element_ty
    live = live_rows(mask, b, n * C + i, T, MASKED)
    inside = n * C + i < T
    row = b.to(tl.int64) * T + n * C
    token = row * H + h
    matrix = (bh.to(tl.int64) * chunks + n) * (K * V)
    from_start, to_end, carried = borders(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS)
    weights = kept(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS, False)
    if STRENGTH:
        beta = tl.load(strength + (row + i) * H + h, mask=live, other=0.0).to(tl.float32)

    # Rows: what the query and the erase looked up.
    dq = tl.zeros((C, BK), tl.float32)
    db = tl.zeros((C, BK), tl.float32)
    touched = 0.0  # ⟨dS', S⟩
    for v0 in range(0, V, BV):
        vs = v0 + tl.arange(0, BV)
        answered = load_tile(d_o + token * V, i, vs, live, H * V, V, VALUES)
        state = load_state(states + matrix, ks, vs, K, V)
        dq = tl.dot(answered, tl.trans(state), dq, input_precision=PRECISION)
        if ERASE:
            wanted = load_tile(d_w + token * (J * V), i, vs, live, H * (J * V), V, VALUES)
            db = tl.dot(wanted, tl.trans(state), db, input_precision=PRECISION)
        if DECAY:
            d_state = load_state(d_states + matrix, ks, vs, K, V)
            touched += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
    asked = load_tile(q + token * K, i, ks, live, H * K, K, KEYS)
    dq *= from_start[:, None]
    rows = tl.sum(asked.to(tl.float32) * dq, 1)
    if ERASE:
        if TIED:
            lookup = load_tile(x + token * (J * K), i, ks, live, H * (J * K), K, KEYS)
        else:
            lookup = load_tile(erase_key + token * K, i, ks, live, H * K, K, KEYS)
        db *= from_start[:, None]
        if STRENGTH:
            rows -= beta * tl.sum(lookup.to(tl.float32) * db, 1)
        else:
            rows -= tl.sum(lookup.to(tl.float32) * db, 1)
    for j in tl.static_range(J):
        dn = tl.zeros((C, C), tl.float32)
        dm = tl.zeros((C, C), tl.float32)
        for v0 in range(0, V, BV):
            vs = v0 + tl.arange(0, BV)
            answered = load_tile(d_o + token * V, i, vs, live, H * V, V, VALUES)
            if ERASE and j == 0:
                values = load_tile(fed + token * V, i, vs, live, H * V, V, VALUES)
            else:
                values = load_tile(w + (token * J + j) * V, i, vs, live, H * (J * V), V, VALUES)
            dn = tl.dot(answered, tl.trans(values), dn, input_precision=PRECISION)
            if ERASE:
                wanted = load_tile(d_w + token * (J * V), i, vs, live, H * (J * V), V, VALUES)
                dm = tl.dot(wanted, tl.trans(values), dm, input_precision=PRECISION)
        keys = load_tile(x + (token * J + j) * K, i, ks, live, H * (J * K), K, KEYS)
        dq = tl.dot((dn * weights).to(dtype), keys, dq, input_precision=PRECISION)
        if ERASE:
            db = tl.dot(off_diagonal(dm * weights, C).to(dtype), keys, db, input_precision=PRECISION)
    store_tile(d_q + token * K, i, ks, inside, H * K, dq, K, KEYS)
    if ERASE:
        if STRENGTH:
            per_strength = -tl.sum(lookup.to(tl.float32) * db, 1)
            place = block.to(tl.int64) * (tl.num_programs(0) // BLOCKS // chunks) * T
            tl.store(d_strength + place + (row + i) * H + h, per_strength, mask=inside)
            db *= -beta[:, None]
        else:
            db = -db
        if not TIED:
            store_tile(d_erase_key + token * K, i, ks, inside, H * K, db, K, KEYS)

    # Columns: what was written.
    turned = kept(cumulated, documents, bh, b, n, chunks, T, C, DECAY, DOCUMENTS, True)
    crossing = tl.zeros((C, C), tl.float32)
    tail = tl.zeros((C,), tl.float32)
    for j in tl.static_range(J):
        gram_q = tl.zeros((C, C), tl.float32)
        gram_b = tl.zeros((C, C), tl.float32)
        for k0 in range(0, K, BK):
            cs = k0 + tl.arange(0, BK)
            keys = load_tile(x + (token * J + j) * K, i, cs, live, H * (J * K), K, KEYS)
            queries = load_tile(q + token * K, i, cs, live, H * K, K, KEYS)
            gram_q = tl.dot(keys, tl.trans(queries), gram_q, input_precision=PRECISION)
            if ERASE:
                if TIED:
                    lookups = load_tile(x + token * (J * K), i, cs, live, H * (J * K), K, KEYS)
                else:
                    lookups = load_tile(erase_key + token * K, i, cs, live, H * K, K, KEYS)
                gram_b = tl.dot(keys, tl.trans(lookups), gram_b, input_precision=PRECISION)
        gram_q *= turned
        if ERASE:
            gram_b = off_diagonal(gram_b * turned, C)
            if STRENGTH:
                gram_b *= -beta[None, :]
            else:
                gram_b = -gram_b
        dn = tl.zeros((C, C), tl.float32)
        dm = tl.zeros((C, C), tl.float32)
        dx = tl.zeros((C, BK), tl.float32)
        for v0 in range(0, V, BV):
            vs = v0 + tl.arange(0, BV)
            answered = load_tile(d_o + token * V, i, vs, live, H * V, V, VALUES)
            if ERASE and j == 0:
                values = load_tile(fed + token * V, i, vs, live, H * V, V, VALUES)
            else:
                values = load_tile(w + (token * J + j) * V, i, vs, live, H * (J * V), V, VALUES)
            dn = tl.dot(values, tl.trans(answered), dn, input_precision=PRECISION)
            if ERASE:
                wanted = load_tile(d_w + token * (J * V), i, vs, live, H * (J * V), V, VALUES)
                dm = tl.dot(values, tl.trans(wanted), dm, input_precision=PRECISION)
            d_state = load_state(d_states + matrix, ks, vs, K, V)
            dx = tl.dot(values, tl.trans(d_state), dx, input_precision=PRECISION)
            if not ERASE or j > 0:
                dw = tl.zeros((C, BV), tl.float32)
                for k0 in range(0, K, BK):
                    cs = k0 + tl.arange(0, BK)
                    keys = load_tile(x + (token * J + j) * K, i, cs, live, H * (J * K), K, KEYS)
                    outgoing = load_state(d_states + matrix, cs, vs, K, V)
                    dw = tl.dot(keys, outgoing, dw, input_precision=PRECISION)
                dw = tl.dot(gram_q.to(dtype), answered, dw * to_end[:, None], input_precision=PRECISION)
                if ERASE:
                    dw = tl.dot(gram_b.to(dtype), wanted, dw, input_precision=PRECISION)
                store_tile(d_w + (token * J + j) * V, i, vs, inside & (i >= block * C), H * (J * V), dw, V, VALUES)
        keys = load_tile(x + (token * J + j) * K, i, ks, live, H * (J * K), K, KEYS)
        dx *= to_end[:, None]
        crossing += gram_q * dn
        tail += tl.sum(keys.to(tl.float32) * dx, 1)
        dx = tl.dot((dn * turned).to(dtype), asked, dx, input_precision=PRECISION)
        if ERASE:
            crossing += gram_b * dm
            dm = off_diagonal(dm * turned, C)
            dm = dm * -beta[None, :] if STRENGTH else -dm
            dx = tl.dot(dm.to(dtype), lookup, dx, input_precision=PRECISION)
            if TIED and j == 0:
                dx += db
        store_tile(d_x + (token * J + j) * K, i, ks, inside, H * (J * K), dx, K, KEYS)

    if DECAY:
        if BLOCKS > 1:
            crossing = tl.where(block == 0, crossing, 0.0)
        rows += tl.sum(crossing, 0) - tl.sum(crossing, 1)
        before = tl.cumsum(tail, 0) - tail
        dg = tl.cumsum(rows, 0, reverse=True) + before + touched * carried
        place = block.to(tl.int64) * (tl.num_programs(0) // BLOCKS // chunks) * T
        tl.store(d_log_decay + place + (row + i) * H + h, tl.where(live, dg, 0.0), mask=inside)
