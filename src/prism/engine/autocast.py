"""Memories compute in the precision of what they are given, whatever `torch.autocast` says.

In a `backward()` that is called where autocast is on, that holds for the library's own backward passes (the chunk form with
decay per head, the kernels). What torch differentiates itself is cast there: call `backward()` outside, as torch advises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def without_autocast(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run` in the precision of its arguments."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return without_autocast(run, *arguments)  # it may be on for the other, too
    return run(*arguments)
