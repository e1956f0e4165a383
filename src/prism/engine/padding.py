"""Prepare inputs for a memory: zero the padding, repeat grouped heads and the flags of sub-steps.

A masked token must change nothing, even if it holds NaN. It is replaced by `torch.where`, because NaN · 0 is NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x `[B, T, …]` with zeros where `mask` `[B, T]` is False."""
    if mask is None:
        return x
    return torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0.0)


def real_resets(reset: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """`reset` `[B, T]` without those on padding, which are ignored."""
    return reset if reset is None or mask is None else reset & mask


def moved_starts(starts: Tensor, mask: Tensor, positions: Tensor | None = None) -> Tensor:
    """`starts` `[B, T]` with those on padding moved to the row's next real token; dropped if there is none.

    Args:
        positions: `[B, T]`, the tokens' places in their documents. A start then moves only to a token that counts from there:
            callers also number padding inside a document by zeros.
    """
    places = torch.arange(starts.shape[1], device=starts.device)
    start, real = (torch.where(flags, places, -1).cummax(1).values for flags in (starts, mask))
    moved = mask & (start > F.pad(real[:, :-1], (1, 0), value=-1))  # a start since the last real token
    return moved if positions is None else moved & (places - start == positions)


def repeat_mask(mask: Tensor | None, substeps: int) -> Tensor | None:
    """`[B, T]` → `[B, T·n]`: a token's flag at each of its n sub-steps."""
    return mask if mask is None or substeps == 1 else mask.repeat_interleave(substeps, 1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, G, …]` → `[B, T, H, …]`: head h gets group h // (H // G)."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
