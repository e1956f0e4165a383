"""Copy the rows of a sequence into chunks, with each head of a chunk as one matrix, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_chunks(target: Tensor, source: Tensor, start: int, length: int, scale: Tensor | None = None) -> None:
    """Copy rows start … start + length of `[B, R, H, (L,) …]` into chunks `[m, C, …]` (`[m, L·C, …]`), zeros past the end.

    A zero row is an identity, so the last chunk may be partial. `scale`, of the dimensions of `source`, multiplies the rows
    on the way.
    """
    view = _as_chunks(target, source)
    N, C = view.shape[1], view.shape[2]
    whole = length // C
    rest = length - whole * C
    rows, factors = (None if x is None else x.narrow(1, start, length) for x in (source, scale))
    assert rows is not None
    if whole:
        full = [x[:, : whole * C].unflatten(1, (whole, C)) for x in (rows, factors) if x is not None]
        _write(view[:, :whole], *full)
    if whole < N:
        _write(view[:, whole, :rest], *[x[:, whole * C :] for x in (rows, factors) if x is not None])
        view[:, whole, rest:] = 0


def _write(target: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
    if scale is None:
        target.copy_(source)
    else:
        torch.mul(source, scale, out=target)


def copy_from_chunks(target: Tensor, chunks: Tensor, start: int, length: int) -> None:
    """The inverse of `copy_to_chunks`."""
    view = _as_chunks(chunks, target)
    N, C = view.shape[1], view.shape[2]
    whole = length // C
    rows = target.narrow(1, start, length)
    if whole:
        rows[:, : whole * C].unflatten(1, (whole, C)).copy_(view[:, :whole])
    if whole < N:
        rows[:, whole * C :] = view[:, whole, : length - whole * C]


def _as_chunks(chunks: Tensor, rows: Tensor) -> Tensor:
    """`[m, (L·)C, …]` seen as `[B, N, C, H, (L,) …]`, the order of `rows` `[B, R, H, (L,) …]`."""
    _, _, H, *rest = rows.shape
    if rows.ndim == 5:
        return chunks.view(-1, len(rows), H, rest[0], chunks.shape[1] // rest[0], rest[1]).permute(1, 0, 4, 2, 3, 5)
    return chunks.view(-1, len(rows), H, *chunks.shape[1:]).permute(1, 0, 3, 2, *range(4, rows.ndim + 1))
