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
    square = ks[:, None] * K + ks[None, :]
    # A map is a factor as it lies in memory: M S forward, and backward Sᵀ M, everything turned.
    tile = ks[None, :] * V + vs[:, None] if BACKWARD else ks[:, None] * V + vs[None, :]
    S = tl.zeros((BV, K) if BACKWARD else (K, BV), tl.float32)
    if GIVEN:
        S = tl.load(given + head.to(tl.int64) * (K * V) + tile)
    for i in range(segments):
        s = segments - 1 - i if BACKWARD else i
        place = (s * heads + head).to(tl.int64)
        tl.store(entering + place * (K * V) + tile, S)
        if i + 1 < segments:
            over = tl.load(maps + place * (K * K) + square)
            given_on = tl.load(added + place * (K * V) + tile)
            if BACKWARD:
                S = given_on + tl.dot(S, over, input_precision=PRECISION)
            else:
                S = given_on + tl.dot(over, S, input_precision=PRECISION)
