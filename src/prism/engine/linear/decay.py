"""Compute how much of a write is left when it is read, inside one block of C tokens.

With G_i = Σ_{j≤i} g_j, token j's write reaches token i weighted by exp(G_i - G_j) (rows that read S_{i-1} itself use
G_{i-1}). Both classes have the same methods, for one decay per head or one per key channel. Documents may begin inside
the block: nothing crosses such a border.

Numerics. Nothing is divided by a decay and every exponent is ≤ 0, so nothing overflows, however strong the decay. Per
head, sums run in float64 and are subtracted before rounding. Per channel the C×C×K tensor of differences would be far too
large; recursive halving needs matrix products only: the lower-left block of every 2h tokens is
(rows ⊙ exp Σ_{mid+1..i} g)(columns ⊙ exp Σ_{j+1..mid} g)ᵀ, each sum inside its own half. Sums are of numbers ≤ 0 only,
so that they may be made in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Vectors that read the writes of a block, one per token."""

    vectors: Tensor  # [..., C, K]
    strict: bool
    """A token does not read its own write."""
    before: bool
    """Tokens read S_{i-1} undecayed."""


class Documents:
    """Which tokens of a block belong together. `reset` `[…, C]` bool marks the first token of a document."""

    def __init__(self, reset: Tensor) -> None:
        index = reset.long().cumsum(-1)
        self.same = index.unsqueeze(-1) == index.unsqueeze(-2)  # [..., C, C]
        self.from_before = index == 0  # still in the document the block began in
        self.to_the_end = index == index[..., -1:]
        self.carried = index[..., -1] == 0  # [...]


_LOG2_E = 1 / math.log(2)


class HeadDecay:
    """One log-decay per head and token, `[…, C]`, or none (zeros).

    Sums are of logarithms to the base 2: on a CPU exp2 takes a third of the time of exp, and of strong decays, which
    underflow, a thirtieth.
    """

    def __init__(self, log_decay: Tensor, documents: Documents | None) -> None:
        self.documents = documents
        self.dtype = log_decay.dtype
        g = log_decay.double() if log_decay.device.type == "cpu" else log_decay
        self.inclusive = (g * _LOG2_E).cumsum(-1)
        self.exclusive = torch.cat([torch.zeros_like(g[..., :1]), self.inclusive[..., :-1]], -1)

    def weights(self, strict: bool, before: bool) -> Tensor:
        """Γ `[…, C, C]`, zero above the diagonal (`strict`: and on it); `before`: rows read S_{i-1} undecayed."""
        rows = self.exclusive if before else self.inclusive
        exponent = (rows.unsqueeze(-1) - self.inclusive.unsqueeze(-2)).to(self.dtype)
        # Masked before the exponential: above the diagonal it would overflow. Added, because filling is slower.
        exponent = exponent + torch.full_like(exponent[(0,) * (exponent.ndim - 2)], -torch.inf).triu(0 if strict else 1)
        if self.documents is not None:
            exponent = exponent.masked_fill(~self.documents.same, -torch.inf)
        return exponent.exp2()

    def grams(self, kinds: Sequence[Rows], columns: Tensor) -> list[Tensor]:
        """`[…, J, C, K]` → for each kind of rows `[…, C, J, C]`: Σ_d rows_id columns_jd, weighted by Γ_ij."""
        wide, shape = columns.flatten(-3, -2).transpose(-1, -2), columns.shape[-3:-1]
        return [
            (rows @ wide).unflatten(-1, shape) * self.weights(strict, before).unsqueeze(-2)
            for rows, strict, before in kinds
        ]

    def from_start(self, rows: Tensor, before: bool) -> Tensor:
        """`[…, C, K]`: rows times the decay of the incoming state until each of them."""
        left = (self.exclusive if before else self.inclusive).to(self.dtype).exp2()
        if self.documents is not None:
            left = torch.where(self.documents.from_before, left, 0.0)
        return rows * left.unsqueeze(-1)

    def to_end(self, columns: Tensor) -> Tensor:
        """`[…, J, C, K]`: columns times the decay of each write until after the last token."""
        left = (self.inclusive[..., -1:] - self.inclusive).to(self.dtype).exp2()
        if self.documents is not None:
            left = torch.where(self.documents.to_the_end, left, 0.0)
        return columns * left[..., None, :, None]

    def carry(self) -> Tensor:
        """`[…, 1]`: the decay of the incoming state until after the last token, per key channel (here one for all)."""
        left = self.inclusive[..., -1:].to(self.dtype).exp2()
        return left if self.documents is None else torch.where(self.documents.carried.unsqueeze(-1), left, 0.0)


class ChannelDecay:
    """One log-decay per head, token and key channel, `[…, C, K]`."""

    def __init__(self, log_decay: Tensor, documents: Documents | None) -> None:
        self.documents = documents
        self.g = log_decay

    def grams(self, kinds: Sequence[Rows], columns: Tensor) -> list[Tensor]:
        """As in `HeadDecay`, by recursive halving: all kinds of rows and all columns of a half in one product."""
        C, Z = columns.shape[-2], len(kinds)
        size = 1 << (C - 1).bit_length()  # halving needs a power of two; zero rows and columns add nothing
        x = _pad(torch.stack([rows for rows, _, _ in kinds], -3), size)  # [..., Z, size, K]
        y, g = _pad(columns, size), _pad(self.g, size)
        own = torch.einsum("...zck,...jck->...czj", x, y)
        if any(strict for _, strict, _ in kinds):
            own = own * own.new_tensor([float(not strict) for _, strict, _ in kinds]).unsqueeze(-1)
        blocks = own[
            ..., None, :, None
        ]  # [..., size, Z, 1, J, 1]: the diagonal blocks found so far, [..., n, Z, h, J, h]
        weights = {before: _weights_by_level(g, before) for before in {kind.before for kind in kinds}}
        for level in range((size - 1).bit_length()):
            h = 1 << level
            right_of_mid = {before: _halves(all_levels[level], h)[1] for before, all_levels in weights.items()}
            left_of_mid = _halves(weights[kinds[0].before][level], h)[0]
            if len(weights) == 1:
                weight = right_of_mid[kinds[0].before].unsqueeze(-3)  # the same for all kinds
            else:
                weight = torch.stack([right_of_mid[kind.before] for kind in kinds], -3)
            right = _halves(x, h)[1].movedim(-4, -3) * weight  # [..., n, Z, h, K]
            left = _halves(y, h)[0].movedim(-4, -3) * left_of_mid.unsqueeze(-3)  # [..., n, J, h, K]
            corner = right.flatten(-3, -2) @ left.flatten(-3, -2).transpose(-1, -2)
            corner = corner.unflatten(-2, (Z, h)).unflatten(-1, (-1, h))
            upper, lower = blocks[..., 0::2, :, :, :, :], blocks[..., 1::2, :, :, :, :]
            top = torch.cat([upper, torch.zeros_like(upper)], -1)
            blocks = torch.cat([top, torch.cat([corner, lower], -1)], -3)
        grams = [gram[..., :C, :, :C] for gram in blocks[..., 0, :, :, :, :].unbind(-4)]
        if self.documents is None:
            return grams
        return [torch.where(self.documents.same.unsqueeze(-2), gram, 0.0) for gram in grams]

    def spread(self, attention: Tensor, columns: Tensor) -> Tensor:
        """`[…, C, C]`, `[…, C, K]` → `[…, C, K]`: Σ_{j≤i} attention_ij columns_j, each channel weighted by its Γ_ij.

        The mirror image of `gram`, which sums over channels: here they stay (memories that decay per value channel).
        """
        C = columns.shape[-2]
        if self.documents is not None:
            attention = torch.where(self.documents.same, attention, 0.0)
        size = 1 << (C - 1).bit_length()
        y, g = _pad(columns, size), _pad(self.g, size)
        A = torch.nn.functional.pad(attention, (0, size - C, 0, size - C))
        out = A.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * y
        h = 1
        while h < size:
            left_of_mid, right_of_mid = _halves(g, h)
            pairs = A.unflatten(-2, (-1, 2 * h)).unflatten(-1, (-1, 2 * h)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            left = _halves(y, h)[0] * _after(left_of_mid).exp()
            right = (pairs[..., h:, :h] @ left) * right_of_mid.cumsum(-2).exp()
            out = out + torch.stack([torch.zeros_like(right), right], -3).flatten(-4, -2)
            h *= 2
        return out[..., :C, :]

    def from_start(self, rows: Tensor, before: bool) -> Tensor:
        """As in `HeadDecay`."""
        left = (_before(self.g) if before else self.g.cumsum(-2)).exp()
        if self.documents is not None:
            left = torch.where(self.documents.from_before.unsqueeze(-1), left, 0.0)
        return rows * left

    def to_end(self, columns: Tensor) -> Tensor:
        """As in `HeadDecay`."""
        left = _after(self.g).exp()
        if self.documents is not None:
            left = torch.where(self.documents.to_the_end.unsqueeze(-1), left, 0.0)
        return columns * left.unsqueeze(-3)

    def carry(self) -> Tensor:
        """As in `HeadDecay`, `[…, K]`."""
        left = self.g.sum(-2).exp()
        return left if self.documents is None else torch.where(self.documents.carried.unsqueeze(-1), left, 0.0)


def _pad(x: Tensor, size: int) -> Tensor:
    """`[…, C, K]` → `[…, size, K]`, zeros at the end."""
    return torch.nn.functional.pad(x, (0, 0, 0, size - x.shape[-2])) if size != x.shape[-2] else x


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """`[…, C, K]` → the first and second halves of every 2h rows, `[…, C/2h, h, K]`."""
    first, second = x.unflatten(-2, (-1, 2, h)).unbind(-3)
    return first, second


def _weights_by_level(g: Tensor, before: bool) -> list[Tensor]:
    """`[…, C, K]` → for every level of halving `[…, C, K]`: exp of the sum of g between each token and its midpoint.

    A token left of the midpoint sums what comes after it, one right of it sums up to itself (`before`: without itself).
    """
    size = min(g.shape[-2], _SUMMED)
    blocks = g.unflatten(-2, (-1, size))
    weights = (_sums(size, before, g) @ blocks).unflatten(-2, (-1, size)).movedim(-3, -4).flatten(-3, -2).exp()
    found = list(weights.unbind(-3))  # one backward for all levels, where slices would each fill with zeros
    h = size
    while h < g.shape[-2]:
        left, right = _halves(g, h)
        found.append(
            torch.cat([_after(left), _before(right) if before else right.cumsum(-2)], -2).flatten(-3, -2).exp()
        )
        h *= 2
    return found


_SUMMED = 64
"""Blocks up to this size sum the exponents of all levels in one product. Its matrix grows as the square."""


def _sums(C: int, before: bool, like: Tensor) -> Tensor:
    """`[levels · C, C]` of zeros and ones: which log-decays each token sums at each level."""
    row = torch.arange(C, device=like.device)[:, None]
    column = torch.arange(C, device=like.device)
    h = 2 ** torch.arange((C - 1).bit_length(), device=like.device)[:, None, None]
    middle = row // (2 * h) * 2 * h + h  # [levels, C, 1]
    left = (row < middle) & (column > row) & (column < middle)
    right = (row >= middle) & (column >= middle) & (column < row if before else column <= row)
    return (left | right).to(like.dtype).flatten(0, 1)


def _before(g: Tensor) -> Tensor:
    """Σ of the rows before each one."""
    return torch.cat([torch.zeros_like(g[..., :1, :]), g[..., :-1, :].cumsum(-2)], -2)


def _after(g: Tensor) -> Tensor:
    """Σ of the rows after each one; summed from the end, never as total minus prefix."""
    return _before(g.flip(-2)).flip(-2)
