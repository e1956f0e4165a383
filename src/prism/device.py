"""The device that a name such as `auto`, `cpu` or `cuda` stands for."""

from __future__ import annotations

import os

import torch


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
