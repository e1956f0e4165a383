"""Tile sizes of the kernels with a decay per key channel, as `configurations.py` has them for one decay per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prism.engine.kernels.configurations import Tiling, architecture, latest_forced


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
    chunk: int = 32
    key_block: int = 64
    segments: int | None = None
    """Segments of a sequence that run in parallel; None: as many as fill the GPU."""


MEASURED: dict[tuple[int, int, int, str], ChannelConfiguration] = {}
"""(K, V, columns, architecture) → the configuration that was fastest in bfloat16, as in `configurations.py`."""


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
        return ChannelConfiguration(Tiling(min(key_dim, 32)), small, small, small, chunk=16, key_block=min(key_dim, 32))
    wide, keys = Tiling(min(value_dim, 64), stages=2), min(key_dim, 64)
    if key_dim > 128:  # registers and shared memory are scarce
        narrow = Tiling(min(value_dim, 32))
        return ChannelConfiguration(Tiling(keys), narrow, narrow, narrow, key_block=min(keys, 32))
    return ChannelConfiguration(Tiling(min(keys, 32), 2), wide, wide, Tiling(wide.block), key_block=keys)
