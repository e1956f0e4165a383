"""Read a call's attention mask and document starts: None where they would change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from prism.documents import needed_starts, starts_of_positions
from prism.engine.inputs import moved_starts, values_may_be_read


def padding_mask(attention_mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """`[B, T]` bool for the mixers, or None if nothing is padding."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask must be [B, T] = {[batch, tokens]}, or longer by the tokens in the cache, "
            f"got {list(getattr(attention_mask, 'shape', [])) or type(attention_mask).__name__}"
        )
    mask = attention_mask[:, -tokens:].bool()
    return None if _may_read(mask) and bool(mask.all()) else mask


def _may_read(flags: Tensor) -> bool:
    """Whether a mask's or reset's values may choose the path: not in a training step on a GPU, which would synchronise."""
    return values_may_be_read(flags) if torch.is_grad_enabled() else not torch.compiler.is_compiling()


def document_starts_of(
    reset: Tensor | None, position_ids: Tensor | None, mask: Tensor | None, batch: int, tokens: int, fresh: bool
) -> Tensor | None:
    """`[B, T]` bool, or None if no document starts here (with an empty cache a start at the first token has no effect).

    A start by `position_ids` on padding, where `mask` `[B, T]` is False, moves to the document's first real token.
    """
    positions = position_ids if reset is None else None
    if reset is None:
        if position_ids is None:
            return None
        reset = starts_of_positions(position_ids).expand(batch, -1)
    if tuple(reset.shape) != (batch, tokens):
        raise ValueError(f"reset and position_ids must be [B, T] = {[batch, tokens]}, got {list(reset.shape)}")
    reset = reset.bool()
    starts = needed_starts(reset, fresh) if _may_read(reset) else reset
    if starts is None or positions is None or mask is None:
        return starts
    return moved_starts(starts, mask, positions)
