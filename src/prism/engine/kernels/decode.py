"""Decoding: tokens one after the other, a state read once and written once, gates and all in one kernel.

One program holds BV value columns of one head's state in registers. The arithmetic is that of `engine/recurrent.py`, in
float32; q, k and the erase may have fewer heads than w (head h reads group h // (H // G)).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row(tensor, row, h, H, groups, apart, ks, K: tl.constexpr):
    """A vector of `[rows, groups, K]`, whose vectors begin `apart` numbers after one another, as float32 `[K, 1]`."""
    group = h // (H // groups)
    return tl.load(tensor + (row * groups + group) * apart + ks, mask=ks < K, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["T", "H", "q_groups", "k_groups", "b_groups", "a_groups"])
def step_kernel(
    q,
    k,
    w,
    log_decay,
    erase_key,
    erase_strength,
    erase_write,
    reset,
    mask,
    state,
    new_state,
    o,
    T,
    H,
    q_groups,
    k_groups,
    b_groups,
    a_groups,
    b_apart,
    SUBSTEPS: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """`state` and `new_state` `[B, H, K, V]` may be the same memory. Tensors that are None are left out of the code. The
    erase's vectors begin `b_apart` numbers after one another: it may be the first of k's, as it lies there."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    bh = pid // BLOCKS
    b, h = (bh // H).to(tl.int64), bh % H
    ks = tl.arange(0, BK)
    vs = pid % BLOCKS * BV + tl.arange(0, BV)
    place = bh.to(tl.int64) * (K * V) + ks[:, None] * V + vs[None, :]
    inside = (ks < K)[:, None] & (vs < V)[None, :]
    S = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        S = tl.load(state + place, mask=inside, other=0.0)

    for i in range(T):
        token = b * T + i
        live = True
        if mask is not None:
            live = tl.load(mask + token) != 0
        before = S
        if reset is not None:
            S = tl.where(tl.load(reset + token) != 0, 0.0, S)
        if log_decay is not None:
            S = S * tl.exp(tl.load(log_decay + token * H + h).to(tl.float32))
        for s in tl.static_range(SUBSTEPS):
            row = token * SUBSTEPS + s
            if erase_key is not None:
                lookup = load_row(erase_key, row, h, H, b_groups, b_apart, ks, K)
                seen = tl.sum(S * lookup, 0)
                if erase_strength is not None:
                    seen *= tl.load(erase_strength + row * H + h).to(tl.float32)
                    S = S - lookup * seen[None, :]
                else:
                    S = S - load_row(erase_write, row, h, H, a_groups, K, ks, K) * seen[None, :]
            for l in tl.static_range(L):
                key = load_row(k + l * K, row, h, H, k_groups, L * K, ks, K)
                value = tl.load(w + ((row * H + h) * L + l) * V + vs, mask=vs < V, other=0.0).to(tl.float32)
                S = S + key * value[None, :]
        out = tl.sum(S * load_row(q, token, h, H, q_groups, K, ks, K), 0)
        if mask is not None:
            out = tl.where(live, out, 0.0)
            S = tl.where(live, S, before)
        tl.store(o + (token * H + h) * V + vs, out.to(o.dtype.element_ty), mask=vs < V)

    tl.store(new_state + place, S, mask=inside)
