"""Read where packed documents start from their offsets, as flash-linear-attention and varlen attention take them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from prism.engine.checks import describe, values_may_be_read
from prism.engine.padding import moved_starts


def packed_starts(
    cu_seqlens: Any, reset: Tensor | None, shape: Sequence[int], mask: Tensor | None = None
) -> Tensor | None:
    """`reset`, or from offsets `[n + 1]` of n documents in one row `[1, T]`: bool `[1, T]`, True where one starts.

    The first document continues a state that comes in, so that its start is not among them. Offsets are 0 first and T last
    and do not decrease; equal ones are an empty document. With `mask` `[1, T]` a document whose first tokens are padding
    starts at its first real token.

    >>> packed_starts(torch.tensor([0, 2, 5]), None, (1, 5))
    tensor([[False, False,  True, False, False]])
    """
    if cu_seqlens is None:
        return reset
    if reset is not None:
        raise ValueError("reset and cu_seqlens both say where documents start: give one of them")
    batch, tokens = shape[0], shape[1]
    check_offsets_tensor(cu_seqlens)
    if batch != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one row [1, T], got {batch} rows: flatten them, or use reset"
        )
    if values_may_be_read(cu_seqlens):
        check_offsets(cu_seqlens, tokens)
    starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)  # an empty document may start at T
    starts[cu_seqlens[1:-1].long()] = True
    starts = starts[:tokens].unsqueeze(0)
    fits = (
        isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == starts.shape
    )  # if not, others complain
    return moved_starts(starts, mask) if mask is not None and fits else starts


def check_offsets_tensor(offsets: Any, name: str = "cu_seqlens") -> None:
    """Raise an error unless this is an integer tensor `[n + 1]`, n ≥ 1. Reads no values."""
    integers = isinstance(offsets, Tensor) and offsets.dtype in (torch.int32, torch.int64)
    if not integers or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"{name} must be an integer tensor of n + 1 offsets, got {describe(offsets)}")


def check_offsets(offsets: Tensor, tokens: int, name: str = "cu_seqlens") -> None:
    """Raise an error unless offsets rise from 0 to the number of tokens. Reads the values."""
    found = offsets.tolist()
    if found[0] != 0 or found[-1] != tokens or any(b < a for a, b in pairwise(found)):
        shown = str(found if len(found) <= 8 else [*found[:4], "…", *found[-3:]]).replace("'", "")
        raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, got {shown}")
