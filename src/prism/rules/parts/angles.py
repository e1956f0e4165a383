"""Angles that add up from token to token, for rotations that the data chooses (Mamba-3)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.rules.rule import Span

_BLOCK = 64


def running_angle(turn: Tensor, start: Tensor | None, span: Span) -> tuple[Tensor, Tensor]:
    """The sum of all turns of a token's document up to the token, and the carry from which the next call continues.

    Args:
        turn: each token's turn `[B, T, …]`, in radians.
        start: the carry that an earlier call returned, `[B, …]`; None: the sequence starts here.

    Returns the angle before the first token and after each one, `[B, 1 + T, …]`, and the angle after the last real token
    `[B, …]`; all are modulo 2π, up to a few turns.
    """
    start = torch.zeros_like(turn[:, 0]) if start is None else start.to(turn.dtype)
    angle = _sum(turn)
    continues = None  # [B, T, …]: whether a token's document began before this span
    if span.reset is not None:
        angle, continues = _restarted(angle, span.reset)
    start, end = (start, None) if span.context is None else _of_part(angle, start, span)
    angle = angle + (start.unsqueeze(1) if continues is None else torch.where(continues, start.unsqueeze(1), 0.0))
    angle = torch.cat([start.unsqueeze(1), angle], 1)
    return angle, wrapped(span.last(angle, 1)[:, 0]) if end is None else end


def wrapped(angle: Tensor) -> Tensor:
    """The same angle in [-π, π]."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).round().detach()


def _sum(turn: Tensor) -> Tensor:
    """Sums over tokens `[B, T, …]`, modulo 2π: within blocks of tokens as they are, over blocks in float64.

    In float32 alone the phase would be lost after some 10,000 tokens.
    """
    T = turn.shape[1]
    if T <= _BLOCK:
        return turn.cumsum(1)
    spare = -T % _BLOCK
    blocks = F.pad(turn, (0, 0) * (turn.ndim - 2) + (0, spare)).unflatten(1, (-1, _BLOCK))
    total = blocks[:, :-1].sum(2, dtype=torch.float64).cumsum(1)
    before = F.pad(wrapped(total), (0, 0) * (turn.ndim - 2) + (1, 0)).to(turn.dtype)
    return (before.unsqueeze(2) + blocks.cumsum(2)).flatten(1, 2)[:, :T]


def _restarted(angle: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Sums that start from 0 at every document, and which tokens `[B, T, 1 …]` belong to the document before the span."""
    index = torch.arange(angle.shape[1], device=angle.device)
    began = torch.where(reset, index, -1).cummax(1).values
    began = began.reshape(*began.shape, *[1] * (angle.ndim - 2))
    before = torch.cat([torch.zeros_like(angle[:, :1]), angle[:, :-1]], 1)
    base = before.gather(1, began.clamp(min=0).expand_as(angle))
    return angle - base.where(began >= 0, 0.0), began < 0


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
