"""Numbers that are none: NaN and infinity must not be learned from, and never be saved."""

from __future__ import annotations

import torch
from torch import Tensor


class NotFiniteError(ValueError):
    """The run met NaN or infinity and cannot go on."""


def refuse_non_finite(tensors: dict[str, Tensor], where: str) -> None:
    """Of a sharded tensor each process looks at its own part."""
    for name, value in tensors.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            raise NotFiniteError(f"{name} is not finite: {where} is not written")
