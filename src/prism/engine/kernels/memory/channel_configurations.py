"""Tile sizes of the kernels with a decay per key channel, as `configurations.py` has them for one decay per head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from prism.engine.kernels.memory.configurations import Tiling, architecture, latest_forced


@dataclass(frozen=True)
class ChannelConfiguration:
    """Tile sizes of all channel passes, which share chunks of `chunk` tokens.

    A block of `prepare` is key channels. A program of `tokens` has `key_block` key channels and loops over blocks of value
    channels.
    """

    prepare: Tiling
    forward_scan: Tiling
    backward_scan: Tiling
    tokens: Tiling
    chunk: int = 16
    key_block: int = 64
    segments: int | None = None
    """Segments of a sequence that run in parallel; None: as many as fill the GPU."""


_HOPPER = ChannelConfiguration(
    Tiling(64, 1), Tiling(64, stages=3), Tiling(64, stages=3), Tiling(64, 1, stages=2), key_block=32
)

MEASURED: dict[tuple[int, int, int, str], ChannelConfiguration] = {
    (128, 128, 1, "sm90"): _HOPPER,
    (128, 128, 2, "sm90"): replace(_HOPPER, tokens=Tiling(64, 2, stages=3), key_block=64),
}
"""(K, V, columns, architecture) → the configuration that was fastest in bfloat16, as in `configurations.py`.

Short chunks, although their scans take longer: the passes over tokens are bound by registers and by the layouts in which a
product wants its factors, which every warp of a program computes again."""


def channel_configuration(
    key_dim: int, value_dim: int, columns: int, dtype: torch.dtype, device: torch.device
) -> ChannelConfiguration:
    """The measured configuration for these sizes, or the default one."""
    forced = latest_forced(ChannelConfiguration)
    if forced is not None:
        return forced
    K, V, J = int(key_dim), int(value_dim), int(columns)  # widths are constants even where shapes are symbolic
    found = None if dtype == torch.float32 else MEASURED.get((K, V, J, architecture(device)))
    return found or default(K, V, dtype)


def default(key_dim: int, value_dim: int, dtype: torch.dtype) -> ChannelConfiguration:
    """A configuration small enough to compile and run for any sizes."""
    if dtype == torch.float32:  # no tensor cores: only small unrolled products compile
        small = Tiling(min(value_dim, 16))
        return ChannelConfiguration(Tiling(min(key_dim, 32)), small, small, small, key_block=min(key_dim, 32))
    keys, wide = min(key_dim, 64), Tiling(min(value_dim, 64), stages=3)
    if key_dim > 128:  # registers and shared memory are scarce
        narrow = Tiling(min(value_dim, 32))
        return ChannelConfiguration(Tiling(keys, 1), narrow, narrow, replace(narrow, warps=2), key_block=keys)
    return ChannelConfiguration(Tiling(keys, 1), wide, wide, replace(wide, warps=2), key_block=keys)
