"""Angles that add up from token to token, for rotations that the data chooses (Mamba-3)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.rules.rule import Span

_CIRCLE = 2.0**32
"""The units of a full turn."""


def running_angle(turn: Tensor, start: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
    """The sum of all turns of a token's document up to the token, and the carry from which the next call continues.

    Args:
        turn: each token's turn `[B, T, …]`, in radians.
        start: the carry that an earlier call returned, `[B, …]`; None: the sequence starts here.

    Returns the angle before the first token and after each one, `[B, 1 + T, …]`, and the angle after the last real token
    `[B, …]`; all are modulo 2π, up to a few turns.
    """
    start = torch.zeros_like(turn[:, 0]) if start is None else start.to(turn.dtype)
    angle, earlier = _sum(turn, span.reset)
    start, end = (start, None) if span.context is None else _of_part(angle, start, span)
    angle = angle + (start.unsqueeze(1) if earlier is None else torch.where(earlier, start.unsqueeze(1), 0.0))
    angle = torch.cat([start.unsqueeze(1), angle], 1)
    return angle, wrapped(span.last(angle, 1)[:, 0]) if end is None else end


def wrapped(angle: Tensor) -> Tensor:
    """The same angle in [-π, π]."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).round().detach()


def _sum(turn: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sums over the tokens of a document, in [0, 2π], and which tokens `[B, T, 1 …]` belong to the document before the span.

    Every turn is rounded to a multiple of 2^-32 of a circle. In float64 their sums are exact then: they keep their phase in
    long sequences, and those of a document do not depend on what stands before it, to the bit.
    """
    unit = turn.double() * (_CIRCLE / (2 * math.pi))
    if turn.dtype != torch.float64:
        unit = unit + (unit.round() - unit).detach()
    total = unit.cumsum(1)
    earlier = None
    if reset is not None:
        index = torch.arange(turn.shape[1], device=turn.device)
        began = torch.where(reset, index, -1).cummax(1).values
        began = began.reshape(*began.shape, *[1] * (turn.ndim - 2))
        before = F.pad(total[:, :-1], (0, 0) * (turn.ndim - 2) + (1, 0))
        earlier = began < 0
        total = total - torch.where(earlier, 0.0, before.gather(1, began.clamp(min=0).expand_as(total)))
    return (total.remainder(_CIRCLE) * (2 * math.pi / _CIRCLE)).to(turn.dtype), earlier


def _of_part(angle: Tensor, first: Tensor, span: Span) -> tuple[Tensor, Tensor]:
    """The angle before this part of a sequence and the one after it, `[B, …]`, from sums that start from 0 here."""
    assert span.context is not None
    last = angle[:, -1]
    keeps = torch.ones(len(last), *[1] * last.ndim, dtype=last.dtype, device=last.device)  # 0: a document starts here
    if span.reset is not None:
        keeps = torch.where(span.reset.any(1).view_as(keeps), 0.0, keeps)
    start, end = (z.squeeze(-1) for z in span.context.chain(keeps, last.unsqueeze(-1), first.unsqueeze(-1)))
    end = wrapped(end)
    span.exchanged.append(end)
    return wrapped(start), end
