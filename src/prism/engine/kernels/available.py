"""Whether the Triton kernels can run here: installed versions, the device, and the widths of their tiles."""

from __future__ import annotations

import os
import re
import threading
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata

import torch
from torch import Tensor


def at_least(oldest: tuple[int, int], *distributions: str) -> bool:
    """The first of these names that is installed decides."""
    for distribution in distributions:
        try:
            version = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
        return version is not None and tuple(map(int, version.groups())) >= oldest
    return False


INSTALLED = at_least((3, 6), "triton", "triton-windows", "pytorch-triton")
"""Triton, as the kernels know it: torch brings one, but not every torch a new one."""
NEEDED = "needs Triton 3.6 or newer, which is not installed"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads the variable when it is imported, so it is read once here too."""


def outdated(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)


_bound = threading.local()


def _bind(device: torch.device) -> None:
    """Give this thread a CUDA context, without which tensors cannot be described to a kernel. A thread has none before torch
    starts something on it, and the first thing that an autograd thread starts may be one of our kernels."""
    if device not in (devices := _bound.__dict__.setdefault("devices", set())):
        torch.zeros(1, device=device)
        devices.add(device)


def device_guard(z: Tensor) -> AbstractContextManager[None]:
    """A context in which kernels start on z's device (they start on torch's current device)."""
    if z.is_cuda:
        _bind(z.device)
    elsewhere = z.is_cuda and z.device.index != torch.cuda.current_device()
    return torch.cuda.device(z.device) if elsewhere else nullcontext()


def widths(key_dim: int, value_dim: int, on_gpu: bool) -> tuple[int, int]:
    """K and V as the chunk kernels compute them. On a GPU no tile has a side that was never checked on one: both are 32, or
    both at least 64 (32 keys beside 64 values were compiled into an illegal access by Triton 3.6 on an H200)."""
    K, V = padded(key_dim), padded(value_dim)
    least = 16 if not on_gpu else 32 if max(K, V) <= 32 else 64
    return max(K, least), max(V, least)


def padded(width: int) -> int:
    """Tiles are powers of two and at least 16 wide."""
    return max(16, 1 << (width - 1).bit_length())
