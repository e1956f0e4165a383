"""Memories compute in the precision of what they are given, forward and backward, whatever `torch.autocast` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def without_autocast(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run` in the precision of its arguments."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return run(*arguments)
    return run(*arguments)
