"""The chunk form with an erase, forward and backward, for one decay per head (or none); head_chunks.py has the equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prism.engine.linear.chunk_chain import chain, chain_back
from prism.engine.linear.chunk_rows import copy_from_chunks, copy_to_chunks
from prism.engine.linear.chunk_segment import (
    Kind,
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
        copy_from_chunks(o, part.baddbmm_(MN[:, :C], y), start, length)
        if keep:
            kept.append((E, F, y[:, :C].contiguous(), incoming))
    return o, S, kept


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
        E, F, first, incoming = kept[index]
        C = s.chunk
        y = _all_writes(fields, first, start, length, kind)
        q_start, x_end, (MN, _) = s.z[:, :C] * s.start[:, 0], scaled(s.x, s.end), gram(s)
        d_rows = s.z.new_empty(*s.z.shape[:2], incoming.shape[-1])  # [dO; dU]
        d_o = d_rows[:, :C]
        copy_to_chunks(d_o, dO, start, length)

        d_y = MN[:, :C].mT @ d_o
        outgoing, dS = chain_back(F, s.carry, q_start, x_end, d_o, d_y, dS)
        d_first = E.mT @ d_y[:, :C]
        d_u = torch.neg(d_first, out=d_rows[:, C:])
        if y.shape[1] == C:
            d_y = d_first
        else:
            d_y[:, :C] = d_first
            d_y[:, C:].baddbmm_(MN[:, C:, C:].mT, d_u)
        copy_from_chunks(d_w, d_y[:, -L * C :], start, length)

        d_MN = d_rows @ y.mT
        d_z, d_x = d_rows @ incoming.mT, y @ outgoing.mT
        d_z.unflatten(1, (-1, C)).mul_(s.start)
        d_x.unflatten(1, (-1, C)).mul_(s.end)
        if d_g is not None:
            from_state, pairs = (s.z * d_z).sum(-1), as_grid(MN.mul_(d_MN), s)
            d_decay = decay_gradient(
                [
                    (pairs[:, 0], from_state[:, :C], kind.read_before),
                    (pairs[:, 1], from_state[:, C:], kind.look_before),
                ],
                (s.x * d_x).sum(-1).unflatten(1, (-1, C)).sum(1),
                s.carry.flatten() * torch.linalg.vecdot(outgoing.flatten(1), incoming.flatten(1)),
            )
            copy_from_chunks(d_g, d_decay, start, length)
        weighted(d_MN, s)
        d_z.baddbmm_(d_MN, s.x)
        d_x.baddbmm_(d_MN.mT, s.z)
        if s.strength is not None and d_beta is not None:  # b = β k_1
            copy_from_chunks(d_beta, (d_z[:, C:] * s.x[:, :C]).sum(-1), start, length)
            d_x[:, :C].addcmul_(s.strength, d_z[:, C:])
        copy_from_chunks(d_q, d_z[:, :C], start, length)
        copy_from_chunks(d_k, d_x[:, -L * C :], start, length)
        if d_a is not None and d_b is not None:
            copy_from_chunks(d_a, d_x[:, :C], start, length)
            copy_from_chunks(d_b, d_z[:, C:], start, length)
    return d_q, d_k, d_w, d_g, d_a, d_b, d_beta, None, dS


def _all_writes(fields: tuple, first: Tensor, start: int, length: int, kind: Kind) -> Tensor:
    """Y `[m, J·C, V]`, of which the first C columns were kept."""
    if fields[4] is None and fields[2].shape[-2] == 1:
        return first
    y = writes_at(fields, start, length, kind)
    y[:, : first.shape[1]] = first
    return y
