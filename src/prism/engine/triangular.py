"""The inverse of many small unit-lower-triangular matrices at once.

Forward substitution, never repeated squaring: with correlated keys (I - L)(I + L²)(I + L⁴)… is wrong by orders of magnitude
in float32. Rows one by one inside 16×16 diagonal blocks, all blocks of all matrices together; then neighbouring blocks are
joined, [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]. LAPACK would take the matrices one after the other.
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
    """Forward substitution: row i of the inverse is e_i minus what the rows above it contribute."""
    rows = [torch.zeros_like(blocks[..., 0, :]) for _ in range(blocks.shape[-1])]
    for i, row in enumerate(rows):
        row[..., i] = 1
        if i:
            above = torch.stack(rows[:i], -2)[..., :i]
            row[..., :i] = -(blocks[..., i, :i].unsqueeze(-2) @ above).squeeze(-2)
    return torch.stack(rows, -2)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """`[m, C, C]` → a view of its diagonal blocks `[m, C/size, size, size]`."""
    tiles = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [m, block row, size, block column, size]
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)
