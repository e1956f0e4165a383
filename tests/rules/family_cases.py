"""What the tests of this folder share: rules off their starting values, and what they tell the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism import Mixer
from prism.rules.rule import Span

WIDTH, HEADS = 16, 2


def stirred(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Mixer:
    """All parameters moved off their starting values, so that no zero hides a path."""
    mixer = Mixer(name, WIDTH, HEADS, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer.to(dtype).requires_grad_(False)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=dtype)


def tell(rule: Any, x: Tensor) -> tuple[Any, Any]:
    """What a rule tells the memory at the start of a sequence, and what it keeps for its output."""
    update, _, extra = rule.update(x, {}, Span())
    return update, extra
