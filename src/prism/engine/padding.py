"""Prepare inputs for a memory: zero the padding, repeat grouped heads and the flags of sub-steps.

A masked token must change nothing, even if it holds NaN. It is replaced by `torch.where`, because NaN · 0 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x `[B, T, …]` with zeros where `mask` `[B, T]` is False."""
    if mask is None:
        return x
    return torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0.0)


def real_resets(reset: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """`reset` `[B, T]` without those on padding, which are ignored."""
    return reset if reset is None or mask is None else reset & mask


def repeat_mask(mask: Tensor | None, substeps: int) -> Tensor | None:
    """`[B, T]` → `[B, T·n]`: a token's flag at each of its n sub-steps."""
    return mask if mask is None or substeps == 1 else mask.repeat_interleave(substeps, 1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, G, …]` → `[B, T, H, …]`: head h gets group h // (H // G)."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
