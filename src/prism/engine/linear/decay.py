"""Compute how much of a write is left when it is read, inside one block of C tokens.

With G_i = Σ_{j≤i} g_j, token j's write reaches token i weighted by exp(G_i - G_j) (rows that read S_{i-1} itself use
G_{i-1}). Both classes have the same methods, for one decay per head or one per key channel. Documents may begin inside
the block: nothing crosses such a border.

Numerics. Nothing is divided by a decay and every exponent is ≤ 0, so nothing overflows, however strong the decay. Per
head, sums run in float64 and are subtracted before rounding. Per channel the C×C×K tensor of differences would be far too
large; recursive halving needs matrix products only: the lower-left block of every 2h tokens is
(rows ⊙ exp Σ_{mid+1..i} g)(columns ⊙ exp Σ_{j+1..mid} g)ᵀ, each sum inside its own half.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Documents:
    """Which tokens of a block belong together. `reset` `[…, C]` bool marks the first token of a document."""

    def __init__(self, reset: Tensor) -> None:
        index = reset.long().cumsum(-1)
        self.same = index.unsqueeze(-1) == index.unsqueeze(-2)  # [..., C, C]
        self.from_before = index == 0  # still in the document the block began in
        self.to_the_end = index == index[..., -1:]
        self.carried = index[..., -1] == 0  # [...]


class HeadDecay:
    """One log-decay per head and token, `[…, C]`, or none (zeros)."""

    def __init__(self, log_decay: Tensor, documents: Documents | None) -> None:
        self.documents = documents
        self.dtype = log_decay.dtype
        g = log_decay.double() if log_decay.device.type == "cpu" else log_decay
        self.inclusive = g.cumsum(-1)
        self.exclusive = torch.cat([torch.zeros_like(g[..., :1]), self.inclusive[..., :-1]], -1)

    def weights(self, strict: bool, before: bool) -> Tensor:
        """Γ `[…, C, C]`, zero above the diagonal (`strict`: and on it); `before`: rows read S_{i-1} undecayed."""
        rows = self.exclusive if before else self.inclusive
        exponent = rows.unsqueeze(-1) - self.inclusive.unsqueeze(-2)
        C = exponent.shape[-1]
        keep = torch.ones(C, C, dtype=torch.bool, device=exponent.device).tril(-1 if strict else 0)
        if self.documents is not None:
            keep = keep & self.documents.same
        # Masked before the exponential: above the diagonal it would overflow.
        return exponent.to(self.dtype).masked_fill(~keep, -torch.inf).exp()

    def gram(self, rows: Tensor, columns: Tensor, strict: bool, before: bool) -> Tensor:
        """`[…, C, K]`, `[…, J, C, K]` → `[…, J, C, C]`: Σ_d rows_id columns_jd, weighted by Γ_ij."""
        return (rows.unsqueeze(-3) @ columns.transpose(-1, -2)) * self.weights(strict, before).unsqueeze(-3)

    def from_start(self, rows: Tensor, before: bool) -> Tensor:
        """`[…, C, K]`: rows times the decay of the incoming state until each of them."""
        left = (self.exclusive if before else self.inclusive).to(self.dtype).exp()
        if self.documents is not None:
            left = torch.where(self.documents.from_before, left, 0.0)
        return rows * left.unsqueeze(-1)

    def to_end(self, columns: Tensor) -> Tensor:
        """`[…, J, C, K]`: columns times the decay of each write until after the last token."""
        left = (self.inclusive[..., -1:] - self.inclusive).to(self.dtype).exp()
        if self.documents is not None:
            left = torch.where(self.documents.to_the_end, left, 0.0)
        return columns * left[..., None, :, None]

    def carry(self) -> Tensor:
        """`[…, 1]`: the decay of the incoming state until after the last token, per key channel (here one for all)."""
        left = self.inclusive[..., -1:].to(self.dtype).exp()
        return left if self.documents is None else torch.where(self.documents.carried.unsqueeze(-1), left, 0.0)


class ChannelDecay:
    """One log-decay per head, token and key channel, `[…, C, K]`."""

    def __init__(self, log_decay: Tensor, documents: Documents | None) -> None:
        self.documents = documents
        self.g = log_decay

    def gram(self, rows: Tensor, columns: Tensor, strict: bool, before: bool) -> Tensor:
        """As in `HeadDecay`, by recursive halving."""
        C = rows.shape[-2]
        size = 1 << (C - 1).bit_length()  # halving needs a power of two; zero rows and columns add nothing
        x, y, g = _pad(rows, size).unsqueeze(-3), _pad(columns, size), _pad(self.g, size).unsqueeze(-3)
        diagonal = (x * y).sum(-1) * (0.0 if strict else 1.0)
        blocks = diagonal[..., None, None]  # [..., size, 1, 1]: the diagonal blocks found so far
        h = 1
        while h < size:
            left_of_mid, right_of_mid = _halves(g, h)
            right = _halves(x, h)[1] * (_before(right_of_mid) if before else right_of_mid.cumsum(-2)).exp()
            left = _halves(y, h)[0] * _after(left_of_mid).exp()
            corner = right @ left.transpose(-1, -2)
            upper, lower = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
            top = torch.cat([upper, torch.zeros_like(upper)], -1)
            blocks = torch.cat([top, torch.cat([corner, lower], -1)], -2)
            h *= 2
        gram = blocks[..., 0, :C, :C]
        return gram if self.documents is None else torch.where(self.documents.same.unsqueeze(-3), gram, 0.0)

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


def _before(g: Tensor) -> Tensor:
    """Σ of the rows before each one."""
    return torch.cat([torch.zeros_like(g[..., :1, :]), g[..., :-1, :].cumsum(-2)], -2)


def _after(g: Tensor) -> Tensor:
    """Σ of the rows after each one; summed from the end, never as total minus prefix."""
    return _before(g.flip(-2)).flip(-2)
