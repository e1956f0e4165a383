"""How each kernel is cut up: measured per (K, V, columns, architecture), never searched for at run time.

A `Tiling` says how many value (or key) columns one program takes, how many warps it has and how many loads it keeps ahead.
`benchmarks/tune.py` measures tilings on the GPU at hand and prints rows for `MEASURED`; every row here has passed the
float64 check of `benchmarks/gpu.py` on that architecture (a Triton version can compile one tiling wrongly and the next one
right).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CHUNK = 64


@dataclass(frozen=True)
class Tiling:
    block: int
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Configuration:
    """`chunk` tokens are one matrix product; `scan`, `reverse` and `tokens` are cut along V, `key_block` along K."""

    scan: Tiling
    reverse: Tiling
    tokens: Tiling
    chunk: int = CHUNK
    key_block: int = 128
    inverse_warps: int = 4
    segments: int | None = None
    """Segments of a sequence that run side by side; None: as many as fill the GPU."""


# (K padded, V padded, columns, architecture) -> what was fastest there in bfloat16.
MEASURED: dict[tuple[int, int, int, str], Configuration] = {}

_forced: list[Configuration] = []


def configuration(
    key_dim: int, value_dim: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Configuration:
    if _forced:
        return _forced[-1]
    K, V = padded(key_dim), padded(value_dim)
    found = None if dtype == torch.float32 else MEASURED.get((K, V, columns, architecture(device)))
    return found or default(K, V, columns, dtype)


def default(K: int, V: int, columns: int, dtype: torch.dtype) -> Configuration:
    if dtype == torch.float32:  # no tensor cores: small tiles keep the unrolled products compilable
        return Configuration(Tiling(min(V, 16)), Tiling(min(V, 16)), Tiling(min(V, 32)), chunk=32, key_block=min(K, 32))
    wide = min(V, 64 if K <= 128 else 32)
    return Configuration(Tiling(wide), Tiling(wide), Tiling(min(V, 64)), key_block=min(K, 128))


@contextmanager
def forced(choice: Configuration) -> Iterator[None]:
    """Every kernel inside uses `choice`: for tuning and for tests."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


def padded(width: int) -> int:
    """Tiles are powers of two and at least 16 wide."""
    return max(16, 1 << (width - 1).bit_length())


def architecture(device: torch.device) -> str:
    """`"sm90"`, or `"interpreter"` on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
