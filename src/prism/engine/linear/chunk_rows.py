"""Copy the rows of a sequence into chunks, with each head of a chunk as one matrix, and back."""

from __future__ import annotations

from torch import Tensor


def copy_to_chunks(target: Tensor, source: Tensor, start: int, length: int) -> None:
    """Copy rows start … start + length of `[B, R, H, (L,) …]` into chunks `[m, C, …]` (`[m, L·C, …]`), zeros past the end.

    A zero row is an identity, so the last chunk may be partial.
    """
    view = _as_chunks(target, source)
    N, C = view.shape[1], view.shape[2]
    whole = length // C
    rows = source.narrow(1, start, length)
    view[:, :whole] = rows[:, : whole * C].unflatten(1, (whole, C)) if whole else view[:, :0]
    if whole < N:
        view[:, whole, : length - whole * C] = rows[:, whole * C :]
        view[:, whole, length - whole * C :] = 0


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
    B, H = rows.shape[0], rows.shape[2]
    view = chunks.unflatten(0, (-1, B, H))  # [N, B, H, C, ...]
    if rows.ndim == 5:
        view = view.unflatten(3, (rows.shape[3], -1)).transpose(3, 4)  # [N, B, H, C, L, ...]
    return view.movedim((0, 3), (1, 2))
