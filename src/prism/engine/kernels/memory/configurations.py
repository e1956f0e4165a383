"""Tile sizes of each kernel: measured per (K, V, columns, architecture), never tuned at run time.

`benchmarks/tune.py` measures tilings on the current GPU and prints rows for `MEASURED`. Every row here has passed the
float64 check of `benchmarks/gpu.py` on that architecture: a Triton version can compile one tiling wrongly and the next one
correctly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch


@dataclass(frozen=True)
class Tiling:
    """Channels per tile, warps per program, and how it loads."""

    block: int
    """Value channels per tile."""
    warps: int = 4
    stages: int = 1
    """Loads that are prefetched (software pipelining)."""
    registers: int | None = None
    """Upper bound of registers per thread. Fewer let another program run on a multiprocessor, but may spill."""


@dataclass(frozen=True)
class Configuration:
    """Tile sizes of all passes. The two scans use chunks of `step` tokens, the parallel passes of `chunk`, a multiple.

    A program of a scan has one block of value channels. A program of `backward_queries` or `backward_writes` has `key_block`
    key channels and loops over the blocks of value channels.
    """

    forward_scan: Tiling
    backward_scan: Tiling
    backward_queries: Tiling
    backward_writes: Tiling
    step: int = 32
    chunk: int = 64
    key_block: int = 128
    prepare_warps: int = 1
    prepare_registers: int | None = None
    carry_scan: Tiling | None = None
    """Of a forward scan that only carries a state over a segment and reads nothing; None: as `forward_scan`."""
    segments: int | None = None
    """Segments of a sequence that run in parallel; None: as many as fill the GPU."""

    @cached_property
    def prepare_tiling(self) -> Tiling:
        """Of the prepare pass, whose programs read all key channels of a step."""
        return Tiling(0, self.prepare_warps, 3, self.prepare_registers)


_HOPPER = Configuration(
    Tiling(64, stages=2), Tiling(64, stages=3), Tiling(64, stages=2, registers=168), Tiling(64, stages=2)
)
_HOPPER_64 = replace(
    _HOPPER,
    backward_queries=Tiling(64, stages=2, registers=128),
    backward_writes=Tiling(64, stages=2, registers=168),
)
# Tiles of many columns leave room for too few programs per multiprocessor: half as many tokens per step.
_SHORT_64 = replace(_HOPPER_64, step=16)

MEASURED: dict[tuple[int, int, int, str], Configuration] = {
    (64, 64, 1, "sm90"): _HOPPER_64,
    (64, 64, 2, "sm90"): _SHORT_64,
    (64, 64, 3, "sm90"): _SHORT_64,
    (64, 64, 4, "sm90"): _SHORT_64,
    (128, 128, 1, "sm90"): replace(_HOPPER, forward_scan=Tiling(64, stages=3), prepare_registers=168),
    (128, 128, 2, "sm90"): replace(
        _HOPPER, forward_scan=Tiling(128, warps=8, stages=3), carry_scan=Tiling(64, stages=3)
    ),
    (128, 128, 3, "sm90"): _HOPPER,
    (128, 128, 4, "sm90"): replace(_HOPPER, forward_scan=Tiling(128, warps=8, stages=2)),
}
"""(K, V, columns, architecture) → the configuration that was fastest in bfloat16.

K and V are padded widths (`available.tile_widths`). Columns are the writes of a token, and one more if it erases along another
key than its first. The architecture is `architecture(device)`. Float32 has no rows: it always uses `default`.
"""

_forced: list[Any] = []


def configuration(
    key_dim: int, value_dim: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Configuration:
    """The measured configuration for these sizes, or the default one."""
    forced = latest_forced(Configuration)
    if forced is not None:
        return forced
    K, V, J = int(key_dim), int(value_dim), int(columns)  # widths are constants even where shapes are symbolic
    found = None if dtype == torch.float32 else MEASURED.get((K, V, J, architecture(device)))
    return found or default(K, V, dtype)


def default(key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    """A configuration small enough to compile and run for any sizes."""
    if dtype == torch.float32:  # no tensor cores: only small unrolled products compile
        small = Tiling(min(value_dim, 16), stages=2)
        return Configuration(small, small, small, small, step=16, chunk=32, key_block=min(key_dim, 32))
    wide = Tiling(min(value_dim, 64), stages=2)
    if min(key_dim, value_dim) < 64:
        # Where a loop over the values has one iteration, Triton unrolls it, and the loads of the passes over tokens are not
        # pipelined. On an H200, Triton 3.6 made illegal accesses of it in
        # `backward_queries_kernel` (32 or 16 keys, 64 values in one tile) and in `backward_writes_kernel` (128 keys, 32
        # values, two columns). With half as many values in a tile the loads are pipelined, and all widths are right.
        tokens = Tiling(max(16, min(value_dim // 2, 64)), stages=2)
        return Configuration(wide, wide, tokens, tokens, key_block=min(key_dim, 128))
    if key_dim > 128:  # registers and shared memory are scarce
        narrow = Tiling(min(value_dim, 32), stages=2)
        return Configuration(Tiling(wide.block), wide, narrow, narrow, prepare_warps=4)
    return Configuration(wide, wide, wide, wide, key_block=min(key_dim, 128))


Kind = TypeVar("Kind")


def latest_forced(kind: type[Kind]) -> Kind | None:
    """The configuration of this kind that `forced` set last; None if there is none."""
    return next((choice for choice in reversed(_forced) if isinstance(choice, kind)), None)


@contextmanager
def forced(choice: Any) -> Iterator[None]:
    """Use `choice`, a configuration, for every kernel inside that takes its kind: for tuning and for tests."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


@lru_cache(16)
def architecture(device: torch.device) -> str:
    """The compute capability, such as `"sm90"` for 9.0; `"interpreter"` on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
