"""Check whether the Triton kernels can run here: installed versions, the device, and the widths of their tiles."""

from __future__ import annotations

import os
import re
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata

import torch
from torch import Tensor

TORCH = (2, 6)
"""The oldest torch that the kernels support."""
TRITON = (3, 6), (3, 10)
"""The oldest Triton that the kernels support, and the first untested one: `compat.py` calls private functions."""


def installed_version(*distributions: str) -> tuple[int, int] | None:
    """Major and minor version of the first of these distributions that is installed, without importing it."""
    return next((version for name in distributions if (version := _version(name)) is not None), None)


def _version(distribution: str) -> tuple[int, int] | None:
    try:
        return _numbers(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def find_problem() -> str | None:
    """Why the kernels cannot run with the installed versions, and what to install, in one clause; None if they can."""
    (major, minor), oldest, newest = TORCH, TRITON[0], TRITON[1]
    if _numbers(torch.__version__) < TORCH:
        return f"needs torch {major}.{minor} or newer (pip install 'torch>={major}.{minor}'), not {torch.__version__}"
    found = installed_version("triton", "triton-windows", "pytorch-triton")
    if found is not None and oldest <= found < newest:
        return None
    wanted = f"triton>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1]}"
    have = "none is installed" if found is None else f"{found[0]}.{found[1]} is installed"
    return f"needs Triton {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1] - 1} (pip install '{wanted}'), but {have}"


PROBLEM = find_problem()
"""None if the kernels can run."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels. Read once, as Triton does when it is imported."""

_warned = False


def warn_if_unavailable(x: Tensor) -> None:
    """Warn once that torch computes on a GPU because the installed versions rule the kernels out."""
    global _warned
    if PROBLEM is None or _warned or not x.is_cuda or torch.compiler.is_compiling():
        return
    _warned = True
    warnings.warn(
        f"torch is used in place of PRISM's GPU kernels, which is slower: backend 'triton' {PROBLEM}", stacklevel=2
    )


def outdated(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that is too old for the kernels."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)


def device_refuses(x: Tensor) -> str | None:
    """Why no kernel can run on a tensor's device, or with the installed versions, in one clause; None if kernels can."""
    if PROBLEM is not None:
        return PROBLEM
    if not x.is_cuda and not (INTERPRETED and x.device.type == "cpu"):
        return (
            f"needs a CUDA device, not {x.device.type} (on a CPU, TRITON_INTERPRET=1 runs it in Triton's interpreter)"
        )
    return "needs a GPU of compute capability 8.0 or newer" if outdated(x) else None


_initialised = threading.local()


def _create_context(device: torch.device) -> None:
    """Give this thread a CUDA context, which tensor descriptors need. A thread has none until torch starts something on it,
    and the first thing that an autograd thread starts may be one of our kernels."""
    if device not in (devices := _initialised.__dict__.setdefault("devices", set())):
        torch.zeros(1, device=device)
        devices.add(device)


def device_guard(z: Tensor) -> AbstractContextManager[None]:
    """A context manager that makes z's device current, because kernels start on torch's current device."""
    if z.is_cuda:
        _create_context(z.device)
    elsewhere = z.is_cuda and z.device.index != torch.cuda.current_device()
    return torch.cuda.device(z.device) if elsewhere else nullcontext()


def tile_widths(key_dim: int, value_dim: int, on_gpu: bool) -> tuple[int, int]:
    """K and V as padded for the chunk kernels: powers of two. On a GPU, only sizes that were checked on one: both at least 64,
    or up to 128 keys with 32 to 128 values (tiles of 16 values give wrong gradients; `configurations.default` has more)."""
    K, V = tile_width(key_dim), tile_width(value_dim)
    if not on_gpu:
        return K, V
    return (max(K, 64), max(V, 64)) if max(K, V) > 128 else (K, max(V, 32))


def tile_width(width: int) -> int:
    """`width` rounded up to a power of two, at least 16: what a tile can hold."""
    return max(16, 1 << (width - 1).bit_length())
