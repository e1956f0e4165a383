"""The chunk form with an erase, forward and backward, for one decay per head (or none); head_chunks.py has the equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine.linear.chunk_chain import chain, chain_back
from prism.engine.linear.chunk_rows import copy_from_chunks, copy_to_chunks
from prism.engine.linear.chunk_segment import (
    Kind,
    Segment,
    as_grid,
    decay_gradient,
    gram,
    inverse,
    scaled,
    segment_at,
    segment_rows,
    weighted,
    writes_at,
)

Kept = tuple[Tensor, Tensor, Tensor, Tensor]
"""A segment's T⁻¹ `[m, C, C]`, F `[m, C, K]`, Y_1 `[m, C, V]` and incoming states `[m, K, V]`."""


def forward(
    fields: tuple, reset: Tensor | None, S: Tensor, kind: Kind, keep: bool
) -> tuple[Tensor, Tensor, list[Kept]]:
    """The outputs, the memory after the last row, and with `keep` each segment's `Kept` for `backward`."""
    values = fields[2]
    B, rows, H, _, V = values.shape
    o = values.new_empty(B, rows, H, V)
    kept: list[Kept] = []
    segment = segment_rows(fields, kind)
    for start in range(0, rows, segment):
        length = min(segment, rows - start)
        s, y = segment_at(fields, reset, start, length, kind), writes_at(fields, start, length, kind)
        part, S, found, _ = chunks_forward(s, y, S)
        copy_from_chunks(o, part, start, length)
        if keep:
            kept.append(found)
    return o, S, kept


def chunks_forward(s: Segment, y: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Kept, Tensor]:
    """The outputs of a segment `[m, C, V]`, the memory after it, what `chunks_backward` needs, and [N; M] (`gram`).

    y, `[m, J·C, V]`, are the writes without the erase; it is overwritten.
    """
    C = s.chunk
    z_start, x_end = scaled(s.z, s.start), scaled(s.x, s.end)
    MN, contracts = gram(s)
    E = inverse(s, MN, contracts)
    F = E @ z_start[:, C:]
    if y.shape[1] == C:
        y = E @ y
    else:
        y[:, :C] = E @ (y[:, :C] - MN[:, C:, C:] @ y[:, C:])
    incoming, S = chain(F, s.carry, x_end, y, S)
    part = z_start[:, :C] @ incoming
    return part.baddbmm_(MN[:, :C], y), S, (E, F, y[:, :C].contiguous(), incoming), MN


def backward(
    fields: tuple, reset: Tensor | None, kept: Sequence[Any], dO: Tensor, dS: Tensor, kind: Kind
) -> tuple[Tensor | None, ...]:
    """The gradients of the fields, of the reset (none) and of the incoming memory."""
    rows, L = fields[0].shape[1], fields[2].shape[-2]
    d_q, d_k, d_w, d_g, d_a, d_b, d_beta = (None if x is None else torch.empty_like(x) for x in fields)
    assert d_q is not None and d_k is not None and d_w is not None
    segment = segment_rows(fields, kind)
    for index in reversed(range(len(kept))):
        start = index * segment
        length = min(segment, rows - start)
        s = segment_at(fields, reset, start, length, kind)
        C = s.chunk
        d_rows = s.z.new_empty(*s.z.shape[:2], dO.shape[-1])
        copy_to_chunks(d_rows[:, :C], dO, start, length)
        y = _all_writes(fields, kept[index][2], start, length, kind)
        found = chunks_backward(s, gram(s)[0], kept[index], y, d_rows, dS, None if d_g is None else kind)
        dS = found.incoming
        copy_from_chunks(d_w, found.y[:, -L * C :], start, length)
        copy_from_chunks(d_q, found.z[:, :C], start, length)
        copy_from_chunks(d_k, found.x[:, -L * C :], start, length)
        for target, chunks in ((d_g, found.decay), (d_beta, found.strength)):
            if target is not None and chunks is not None:
                copy_from_chunks(target, chunks, start, length)
        if d_a is not None and d_b is not None:
            copy_from_chunks(d_a, found.x[:, :C], start, length)
            copy_from_chunks(d_b, found.z[:, C:], start, length)
    return d_q, d_k, d_w, d_g, d_a, d_b, d_beta, None, dS


class Gradients(NamedTuple):
    """Of a segment's tensors, in chunks."""

    z: Tensor  # [m, 2C, K]
    x: Tensor  # [m, J·C, K]
    y: Tensor  # [m, J·C, V]
    decay: Tensor | None  # [m, C]
    strength: Tensor | None  # [m, C]
    incoming: Tensor  # [B, H, K, V]


def chunks_backward(
    s: Segment, MN: Tensor, kept: Sequence[Tensor], y: Tensor, d_rows: Tensor, dS: Tensor, decay: Kind | None
) -> Gradients:
    """The gradients of a segment.

    Args:
        s: the segment.
        MN: of `gram`.
        kept: of `chunks_forward`.
        y: Y, `[m, J·C, V]`.
        d_rows: `[m, 2C, V]`, dO in the first C rows; the rest is overwritten.
        dS: the gradient of the state after the segment, `[B, H, K, V]`.
        decay: the kind if the gradient of the log-decay is wanted.
    """
    E, F, _, incoming = kept
    C = s.chunk
    q_start, x_end, d_o = s.z[:, :C] * s.start[:, 0], scaled(s.x, s.end), d_rows[:, :C]
    d_y = MN[:, :C].mT @ d_o
    outgoing, dS = chain_back(F, s.carry, q_start, x_end, d_o, d_y, dS)
    d_first = E.mT @ d_y[:, :C]
    d_u = torch.neg(d_first, out=d_rows[:, C:])
    if y.shape[1] == C:
        d_y = d_first
    else:
        d_y[:, :C] = d_first
        d_y[:, C:].baddbmm_(MN[:, C:, C:].mT, d_u)

    d_MN = d_rows @ y.mT
    d_z, d_x = d_rows @ incoming.mT, y @ outgoing.mT
    d_z.unflatten(1, (-1, C)).mul_(s.start)
    d_x.unflatten(1, (-1, C)).mul_(s.end)
    d_decay = d_strength = None
    if decay is not None:
        from_state, pairs = (s.z * d_z).sum(-1), as_grid(MN * d_MN, s)
        d_decay = decay_gradient(
            [
                (pairs[:, 0], from_state[:, :C], decay.read_before),
                (pairs[:, 1], from_state[:, C:], decay.look_before),
            ],
            (s.x * d_x).sum(-1).unflatten(1, (-1, C)).sum(1),
            s.carry.flatten() * torch.linalg.vecdot(outgoing.flatten(1), incoming.flatten(1)),
        )
    weighted(d_MN, s)
    d_z.baddbmm_(d_MN, s.x)
    d_x.baddbmm_(d_MN.mT, s.z)
    if s.strength is not None:  # b = β k_1
        d_strength = (d_z[:, C:] * s.x[:, :C]).sum(-1)
        d_x[:, :C].addcmul_(s.strength, d_z[:, C:])
    return Gradients(d_z, d_x, d_y, d_decay, d_strength, dS)


def _all_writes(fields: tuple, first: Tensor, start: int, length: int, kind: Kind) -> Tensor:
    """Y `[m, J·C, V]`, of which the first C columns were kept."""
    if fields[4] is None and fields[2].shape[-2] == 1:
        return first
    y = writes_at(fields, start, length, kind)
    y[:, : first.shape[1]] = first
    return y
