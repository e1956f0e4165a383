"""Tokens sent to memories: where they went, where documents begin in each memory, and how evenly they were spread."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.rules.span import Span


class Routing(NamedTuple):
    """Where tokens went, for `output`."""

    weights: Tensor  # [B, M, T], zero where a token was not sent
    order: Tensor  # [B, M, T], the token in each place
    x: Tensor  # [B·M, T, width]
    extra: Any  # the inner rule's


def take(x: Tensor, order: Tensor) -> Tensor:
    """`[B, M, T, D]`: place i of memory m takes token order[b, m, i]."""
    return x.gather(2, order.unsqueeze(-1).expand_as(x))


def borders(order: Tensor, mask: Tensor, stale: Tensor | None, span: Span) -> tuple[Tensor | None, Tensor]:
    """Where documents start in each memory `[B, M, T]`, and which memories `[B, M]` still hold an earlier document.

    A document need not send its first token to a memory, nor any: then the memory starts afresh when it is next written.
    """
    if span.reset is None and stale is None:
        return None, torch.zeros(order.shape[:2], dtype=torch.bool, device=order.device)
    document = torch.zeros_like(order[:, 0]) if span.documents is None else span.documents
    own = document.unsqueeze(1).expand_as(order).gather(-1, order)
    before = torch.zeros_like(own[..., :1]) if stale is None else -stale.long().unsqueeze(-1)
    own = torch.cat([before, own], -1)
    last = own.gather(-1, mask.sum(-1, keepdim=True)).squeeze(-1)
    current = span.last(torch.cat([torch.zeros_like(document[:, :1]), document], 1), 1)
    return (own[..., 1:] != own[..., :-1]) & mask, last != current


def imbalance(scores: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
    """M Σ_m (share of tokens sent to m) · (mean probability of m), over real tokens; top_k if all are alike."""
    real = torch.ones_like(scores[..., :1]) if mask is None else mask.unsqueeze(-1).to(scores.dtype)
    count = real.sum().clamp(min=1)
    share, probability = ((z * real).sum((0, 1)) / count for z in (chosen.to(scores.dtype), scores))
    return scores.shape[-1] * (share * probability).sum()
