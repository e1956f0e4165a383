"""Backward, the last step: from what each kernel found about its rows to the gradient of every token's log-decay.

G_i = Σ_{t ≤ i} g_t, so dg_t collects dG_i of all rows i ≥ t of its chunk; what e^{G_C - G_j} multiplies also lives on after
every row t > j; and the decay of the incoming state involves all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.engine.kernels.tiles import borders


@triton.jit(do_not_specialize=["T", "H", "padded", "heads"])
def decay_kernel(
    cumulated,
    documents,
    d_cumulated,
    tails,
    touched,
    d_log_decay,
    T,
    H,
    padded,
    heads,
    J: tl.constexpr,
    SLABS: tl.constexpr,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    STEP: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """One chunk and head. Partial sums, added up in a fixed order: `d_cumulated` `[SLABS, K/BK, B, H, padded]` (queries, the
    erase if there is one, columns), `tails` `[J, K/BK, B, H, padded]`, `touched` `[K/BK, B, H, chunks]`."""
    chunks = padded // C
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h, t = bh // H, bh % H, n * C
    i = tl.arange(0, C)
    _, _, carried = borders(cumulated, documents, bh, b, t, padded, T, C, STEP, True, DOCUMENTS)
    rows = tl.zeros((C,), tl.float32)
    tail = tl.zeros((C,), tl.float32)
    whole = 0.0
    for s in tl.static_range(SLABS * BLOCKS):
        rows += tl.load(d_cumulated + (s * heads + bh).to(tl.int64) * padded + t + i)
    for s in tl.static_range(J * BLOCKS):
        tail += tl.load(tails + (s * heads + bh).to(tl.int64) * padded + t + i)
    for s in tl.static_range(BLOCKS):
        whole += tl.load(touched + (s * heads + bh) * chunks + n)
    dg = tl.cumsum(rows, 0, reverse=True) + tl.cumsum(tail, 0) - tail + whole * carried
    tl.store(d_log_decay + (b.to(tl.int64) * T + t + i) * H + h, dg, mask=t + i < T)
