"""Split a long sequence with few heads into segments that run in parallel.

A few heads leave most of a GPU idle, so a long sequence runs in three steps: each segment's map M (the matrix by which it
multiplies its incoming state) and its final state D from a zero state; the short chain between segments; all segments in
parallel. `segment_chain_kernel` computes the state that enters each segment: S_{s+1} = M_s S_s + D_s, or backward with M_sᵀ.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.engine.kernels.memory.configurations import Tiling
from prism.engine.kernels.memory.launch import ChunkTables, Launch
from prism.engine.kernels.runtime import side_stream

WIDEST_MAP = 128
"""A segment's map is K × K in float32: 256 × 256 does not fit into the shared memory of a multiprocessor."""


def segment_count(run: Launch) -> int:
    """The number of segments of a call: enough to give every multiprocessor 8 warps, none shorter than 8 chunks.

    One if that gives fewer than 4, because segments process tokens up to three times, or if the chain cannot hold the maps.
    """
    if run.configuration.segments is not None:
        return min(run.configuration.segments, run.chunks)
    if not _may_be_split(run):
        return 1
    tiling = run.configuration.forward_scan
    warps = run.heads * (run.V // min(tiling.block, run.V)) * tiling.warps
    count = min(8 * _multiprocessors(run.u.w.device) // warps, run.chunks // 8)
    return count if count >= 4 else 1


def segment_counts(run: Launch) -> tuple[int, ...]:
    """The numbers of segments for which compiled code differs, at any length: one, and more than one."""
    if run.configuration.segments is not None:
        return (1,) if run.configuration.segments == 1 else (1, 2)
    return (1, 2) if _may_be_split(run) else (1,)


def _may_be_split(run: Launch) -> bool:
    """Whether a sequence is split if it is long enough."""
    return run.u.w.device.type == "cuda" and run.K <= WIDEST_MAP


def incoming(
    run: Launch, tables: ChunkTables, initial: Tensor | None, segments: int
) -> tuple[Tensor | None, Tensor | None]:
    """The state that enters each segment, `[segments, B, H, K, V]`, and the segments' maps."""
    if segments == 1:
        return initial, None
    with side_stream(run.u.w.device) as join:  # each of the two passes leaves a third of the chip to the other
        maps = _maps(run, tables, segments)
    added = run.forward_scan(tables, None, segments)
    join(maps)
    return _chain(run, maps, added, initial, backward=False), maps


def outgoing(run: Launch, tables: ChunkTables, d_o: Tensor, d_final: Tensor | None, segments: int) -> Tensor | None:
    """The gradient of the state that leaves each segment."""
    if segments == 1:
        return d_final
    maps = _maps(run, tables, segments) if tables.maps is None else tables.maps
    return _chain(run, maps, run.backward_scan(tables, d_o, None, segments), d_final, backward=True)


def _maps(run: Launch, tables: ChunkTables, segments: int) -> Tensor:
    return run.forward_scan(tables, None, segments, as_map=True)


@lru_cache(16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _chain(run: Launch, maps: Tensor, added: Tensor, given: Tensor | None, backward: bool) -> Tensor:
    """The state that enters each segment, `[segments, B, H, K, V]`; backward: the gradient of the state that leaves it."""
    entering = torch.empty_like(added)
    block = min(16, run.V)
    run.start(
        segment_chain_kernel, Tiling(block, 8, 3), run.V // block * run.heads,
        maps, added, given, entering, added.shape[0], run.heads,
        V=run.V, BV=block, BACKWARD=backward, GIVEN=given is not None,
    )  # fmt: skip
    return entering


@triton.jit(do_not_specialize=["segments", "heads"])
def segment_chain_kernel(
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
    """One program per head and BV value channels. `maps` `[segments, heads, K, K]`; `added`, `entering`
    `[segments, heads, K, V]`; `given` `[heads, K, V]` enters the first segment (BACKWARD: leaves the last)."""
    BLOCKS: tl.constexpr = V // BV
    pid = tl.program_id(0)
    head = pid // BLOCKS
    ks = tl.arange(0, K)
    vs = pid % BLOCKS * BV + tl.arange(0, BV)
    square = ks[:, None] * K + ks[None, :]
    # A map is used as it is stored: M S forward, and Sᵀ M backward, where everything else is transposed.
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
