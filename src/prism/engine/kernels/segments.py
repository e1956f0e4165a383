"""Segments of a sequence that run side by side.

A few heads leave most of a GPU idle. A long sequence of them is cut into segments: first each one's map (what it does to
whatever state it is given) and its state from nothing, then the short chain between segments, then all segments at once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from prism.engine.kernels.launch import Launch
from prism.engine.kernels.programs import aside
from prism.engine.kernels.told import Prepared

WIDEST_MAP = 128
"""A segment's map is K × K in float32: one of 256 × 256 does not fit into a multiprocessor."""


def side_by_side(run: Launch) -> int:
    """As many as keep every multiprocessor busy with two programs, and none shorter than 8 chunks; one where that would be
    fewer than 4, because every token is passed three times then, or where the chain cannot hold their maps."""
    if run.how.segments is not None:
        return min(run.how.segments, run.chunks)
    if not _cut(run):
        return 1
    wanted = 2 * _multiprocessors(run.u.w.device)
    programs = run.heads * (run.V // min(run.how.scan.block, run.V))
    count = min(wanted // programs, run.chunks // 8)
    return count if count >= 4 else 1


def kinds(run: Launch) -> tuple[int, ...]:
    """What numbers of segments there are for compiled code, at any length: one, and several."""
    if run.how.segments is not None:
        return (1,) if run.how.segments == 1 else (1, 2)
    return (1, 2) if _cut(run) else (1,)


def _cut(run: Launch) -> bool:
    """Whether a sequence that is long enough is cut."""
    return run.u.w.device.type == "cuda" and run.K <= WIDEST_MAP


def incoming(
    run: Launch, ready: Prepared, initial: Tensor | None, segments: int
) -> tuple[Tensor | None, Tensor | None]:
    """The state that enters each segment, `[segments, B, H, K, V]`, and the segments' maps."""
    if segments == 1:
        return initial, None
    with aside(run.u.w.device) as join:  # each of the two leaves a third of the chip to the other
        maps = _maps(run, ready, segments)
    added = run.scan(ready, None, segments)
    join(maps)
    return run.chain(maps, added, initial, backward=False), maps


def outgoing(run: Launch, ready: Prepared, d_o: Tensor, d_final: Tensor | None, segments: int) -> Tensor | None:
    """The gradient of the state that leaves each segment."""
    if segments == 1:
        return d_final
    maps = _maps(run, ready, segments) if ready.maps is None else ready.maps
    return run.chain(maps, run.reverse(ready, d_o, None, segments), d_final, backward=True)


def _maps(run: Launch, ready: Prepared, segments: int) -> Tensor:
    return run.scan(ready, None, segments, as_map=True)


@lru_cache(16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
