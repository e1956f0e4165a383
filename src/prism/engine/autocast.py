"""Keep `torch.autocast` out of the memories: they compute in the precision of their inputs.

If `backward()` runs inside an autocast block, the hand-written backward passes (the chunk form with decay per head, the
kernels) still keep their precision. Operations differentiated by PyTorch are cast there: call `backward()` outside the
block, as PyTorch advises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def without_autocast(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run(*arguments)` with autocast off on the CPU and on CUDA."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return without_autocast(run, *arguments)  # it may be on for the other device, too
    return run(*arguments)
