"""Invert many small unit-lower-triangular matrices at once.

Forward substitution, never repeated squaring: with correlated keys (I - L)(I + L²)(I + L⁴)… is wrong by orders of
magnitude in float32. LAPACK substitutes inside 16×16 diagonal blocks; then neighbouring blocks are joined for all
matrices at once, [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]].

Why 16: up to this size MKL solves on the calling thread. From 32 on it starts all threads for every single matrix, and
each start waits for the slowest of them: milliseconds where another process holds a core.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 16


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + L)⁻¹ for L `[m, C, C]`, of which only the part below the diagonal is read."""
    C = lower.shape[-1]
    size = max(_BLOCK, 1 << (C - 1).bit_length())
    if size != C:  # zeros below an identity change nothing
        lower = F.pad(lower, (0, size - C, 0, size - C))
    inverse = torch.zeros_like(lower, memory_format=torch.contiguous_format)
    diagonal = _diagonal_blocks(inverse, _BLOCK)
    diagonal.copy_(_substitute(_diagonal_blocks(lower, _BLOCK)))
    h = _BLOCK
    while h < size:
        pairs, corners = _diagonal_blocks(inverse, 2 * h), _diagonal_blocks(lower, 2 * h)[..., h:, :h]
        upper, under = pairs[..., :h, :h], pairs[..., h:, h:]
        pairs[..., h:, :h] = -(under @ (corners @ upper))
        h *= 2
    return inverse[:, :C, :C] if size != C else inverse


def _substitute(blocks: Tensor) -> Tensor:
    """(I + L)⁻¹ of diagonal blocks `[…, 16, 16]`, by LAPACK."""
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    return torch.linalg.solve_triangular(blocks, identity.expand_as(blocks), upper=False, unitriangular=True)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """`[m, C, C]` → a view of its diagonal blocks `[m, C/size, size, size]`."""
    tiles = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [m, block row, size, block column, size]
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)
