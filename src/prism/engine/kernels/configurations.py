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


@dataclass(frozen=True)
class Tiling:
    block: int
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Configuration:
    """The serial passes go in steps of `step` tokens, the parallel one in chunks of `chunk` (a multiple).

    The passes are cut along V; the parallel one (`tokens`) also by `key_block` along K.
    """

    scan: Tiling
    reverse: Tiling
    tokens: Tiling
    step: int = 32
    chunk: int = 64
    key_block: int = 128
    prepare_warps: int = 1
    segments: int | None = None
    """Segments of a sequence that run side by side; None: as many as fill the GPU."""


# (K, V, columns, architecture) -> what was fastest there in bfloat16.
MEASURED: dict[tuple[int, int, int, str], Configuration] = {}

_forced: list[Configuration] = []


def configuration(
    key_dim: int, value_dim: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Configuration:
    if _forced:
        return _forced[-1]
    found = None
    if dtype != torch.float32:
        found = MEASURED.get((key_dim, value_dim, columns, architecture(device)))
    return found or default(key_dim, value_dim, dtype)


def default(key_dim: int, value_dim: int, dtype: torch.dtype) -> Configuration:
    if dtype == torch.float32:  # no tensor cores: small tiles keep the unrolled products compilable
        small = Tiling(min(value_dim, 16), stages=2)
        return Configuration(small, small, small, step=16, chunk=32, key_block=min(key_dim, 32))
    wide = min(value_dim, 64)
    if key_dim > 128:  # registers and shared memory are short
        return Configuration(
            Tiling(wide), Tiling(wide, stages=2), Tiling(min(value_dim, 32), stages=2), prepare_warps=4
        )
    piped = Tiling(wide, stages=2)
    return Configuration(piped, piped, piped, key_block=min(key_dim, 128))


@contextmanager
def forced(choice: Configuration) -> Iterator[None]:
    """Every kernel inside uses `choice`: for tuning and for tests."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


def architecture(device: torch.device) -> str:
    """`"sm90"`, or `"interpreter"` on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
