"""Find the device that a name such as `auto`, `cpu` or `cuda` stands for, and copy tensors to it without waiting."""

from __future__ import annotations

import os

import torch
from torch import Tensor

MOST_PINNED = 64 << 20
"""Bytes of a tensor above which `to_device` does not pin it."""


def pick_device(name: str) -> torch.device:
    """The device, tried out; `auto` is cuda where there is one, and `cuda` is this process's own under torchrun."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for it.

    From pageable memory CUDA copies in pieces that wait for the work queued before them, and the host waits too. From
    pinned memory the host does not wait. Torch keeps pinned memory for reuse, so large tensors are not pinned: they are
    tables, which are copied once.
    """
    if device.type == "cuda" and x.device.type == "cpu" and x.nbytes <= MOST_PINNED:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
