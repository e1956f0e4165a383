"""Between segments that ran side by side: what enters each of them, S_{s+1} = M_s S_s + D_s, or backward with M_sᵀ."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["segments", "heads"])
def chain_kernel(
    maps,
    added,
    given,
    entering,
    segments,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BACKWARD: tl.constexpr,
    GIVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a head and BV value columns. `maps` `[segments, heads, K, K]`; `added`, `entering`
    `[segments, heads, K, V]`; `given` `[heads, K, V]` enters the first segment (BACKWARD: leaves the last)."""
    BLOCKS: tl.constexpr = V // BV
    pid = tl.program_id(0)
    head = pid // BLOCKS
    ks = tl.arange(0, K)
    vs = pid % BLOCKS * BV + tl.arange(0, BV)
    tile = ks[:, None] * V + vs[None, :]
    square = ks[:, None] + ks[None, :] * K if BACKWARD else ks[:, None] * K + ks[None, :]
    S = tl.zeros((K, BV), tl.float32)
    if GIVEN:
        S = tl.load(given + head.to(tl.int64) * (K * V) + tile)
    for i in range(segments):
        s = segments - 1 - i if BACKWARD else i
        place = (s * heads + head).to(tl.int64)
        tl.store(entering + place * (K * V) + tile, S)
        if i + 1 < segments:
            moved = tl.dot(tl.load(maps + place * (K * K) + square), S, input_precision=PRECISION)
            S = moved + tl.load(added + place * (K * V) + tile)
