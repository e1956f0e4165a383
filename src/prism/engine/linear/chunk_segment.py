"""Lay out a segment of a sequence in chunks, with its decays, Gram matrices and inverses (head_chunks.py has the symbols)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine.linear.chunk_rows import copy_to_chunks
from prism.engine.linear.decay import Documents, HeadDecay
from prism.engine.linear.triangular import unit_lower_inverse


class Kind(NamedTuple):
    """Settings that do not depend on the data."""

    chunk: int
    segment: int
    """At most this many rows at once (`segment_rows`)."""
    look_before: bool
    """The erase reads the undecayed state."""
    read_before: bool
    """Queries read S_{t-1}."""


class Segment(NamedTuple):
    """A segment's tensors, in m = N·B·H chunks, the first chunk of every row and head first.

    The 2C rows are the queries above the erase keys. The J·C columns are the erase writes (if they are separate) above the
    L write keys. Γ is stored once if queries and erase keys share it, up to the diagonal.
    """

    z: Tensor  # [m, 2C, K]
    x: Tensor  # [m, J·C, K]
    strength: Tensor | None  # β, [m, C, 1], where the erase key is β k_1
    gamma: Tensor  # [m, 2 or 1, C, 1, C]
    start: Tensor  # [m, 2 or 1, C, 1]
    end: Tensor  # [m, 1, C, 1]
    carry: Tensor  # [m, 1, 1]

    @property
    def chunk(self) -> int:
        return self.gamma.shape[-1]


_SMALL_SUM = 8.0
"""Of the absolute values in a row of an inverse that hardly amplifies rounding."""
_CACHED = 2**18
"""Numbers of a segment's values. Measured: twice as many outgrow the cache, half as many cost more calls."""
_CACHED_WITHOUT_ERASE = 2**19
"""The same without an erase, which has fewer temporaries."""


def segment_rows(fields: tuple, kind: Kind) -> int:
    """Rows that are computed at once, whole chunks: so many that the temporaries of all rows and heads fit in a cache."""
    B, _, H, _, V = fields[2].shape
    return fitting_rows(B * H * max(V, fields[0].shape[-1]), kind, erases(fields))


def fitting_rows(width: int, kind: Kind, erase: bool = True) -> int:
    """As `segment_rows`, for rows of `width` numbers."""
    numbers = _CACHED if erase else _CACHED_WITHOUT_ERASE
    return max(1, min(kind.segment, numbers // width) // kind.chunk) * kind.chunk


def erases(fields: tuple) -> bool:
    """Whether there is an `erase_write` or an `erase_strength`."""
    return fields[4] is not None or fields[6] is not None


def segment_at(fields: tuple, reset: Tensor | None, start: int, length: int, kind: Kind) -> Segment:
    """The tensors of rows start … start + length."""
    q, k, w, g, a, b, beta = fields
    B, _, H, K = q.shape
    C = min(kind.chunk, q.shape[1])
    m = -(-length // C) * B * H
    extra = 0 if a is None else C

    z, x = q.new_empty(m, 2 * C, K), q.new_empty(m, extra + w.shape[-2] * C, K)
    copy_to_chunks(z[:, :C], q, start, length)
    copy_to_chunks(x[:, extra:], k, start, length)
    strength = None
    if a is not None:
        copy_to_chunks(z[:, C:], b, start, length)
        copy_to_chunks(x[:, :C], a, start, length)
    elif beta is not None:
        strength = q.new_empty(m, C)
        copy_to_chunks(strength, beta, start, length)
        strength = strength.unsqueeze(-1)
        torch.mul(x[:, :C], strength, out=z[:, C:])

    return Segment(z, x, strength, *decays_of(z, g, reset, start, length, kind, H))


def decays_of(
    z: Tensor, g: Tensor | None, reset: Tensor | None, start: int, length: int, kind: Kind, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gamma, start, end and carry of `Segment`, for rows z `[m, 2C, K]`."""
    decay = decay_of(z, g, reset, start, length, z.shape[1] // 2, heads)
    gamma, left = _row_decays(decay, kind)
    return gamma.unsqueeze(-2), left, decay.to_end(z.new_ones(())), decay.carry().unsqueeze(-1)


def decay_of(
    like: Tensor, g: Tensor | None, reset: Tensor | None, start: int, length: int, C: int, heads: int
) -> HeadDecay:
    """The decays in the m chunks of rows start … start + length; `like` `[m, …]`, g `[B, R, H]`, reset `[B, R]`."""
    log_decay = like.new_zeros(like.shape[0], C)
    if g is not None:
        copy_to_chunks(log_decay, g, start, length)
    documents = None
    if reset is not None:
        begins = torch.zeros_like(log_decay, dtype=torch.bool)
        copy_to_chunks(begins, reset.unsqueeze(2).expand(-1, -1, heads), start, length)
        documents = Documents(begins)
    return HeadDecay(log_decay, documents)


def decay_gradient(rows: list[tuple[Tensor, Tensor, bool]], into_state: Tensor, carried: Tensor) -> Tensor:
    """dg `[m, C]`: dG_i, plus as a row and minus as a column, summed over the tokens at and after each one.

    Args:
        rows: for each kind of rows dΓ ⊙ Γ `[m, C, J, C]`, the part of their gradient that came through the incoming state
            `[m, C]`, and whether they read S_{t-1}.
        into_state: the columns' part that came through the outgoing state, `[m, C]`.
        carried: the gradient of log e^{G_C} from the incoming state itself, `[m]`.
    """
    into_state[:, -1] = 0  # exp(0), as on the diagonal
    d_G = -into_state.double()
    d_G[:, -1] += into_state.sum(-1) + carried
    for pairs, from_state, before in rows:
        if not before:
            # A weight on the diagonal is exp(0). It is left out: its two halves would cancel only up to rounding, which is
            # larger than the gradient of a strong decay.
            pairs.diagonal(dim1=1, dim2=3).zero_()
        d_G -= pairs.sum((1, 2))
        at_rows = pairs.sum((2, 3)) + from_state
        if before:  # G_{i-1}; the first row's is the constant 0
            d_G[:, :-1] += at_rows[:, 1:]
        else:
            d_G += at_rows
    return d_G.flip(-1).cumsum(-1).flip(-1)


def writes_at(fields: tuple, start: int, length: int, kind: Kind) -> Tensor:
    """Y° `[m, J·C, V]`: the writes of rows start … start + length, zeros where the erase has separate columns."""
    w, a = fields[2], fields[4]
    B, rows, H, L, V = w.shape
    C = min(kind.chunk, rows)
    extra = 0 if a is None else C
    y = w.new_empty(-(-length // C) * B * H, extra + L * C, V)
    y[:, :extra] = 0
    copy_to_chunks(y[:, extra:], w, start, length)
    return y


def _row_decays(decay: HeadDecay, kind: Kind) -> tuple[Tensor, Tensor]:
    """Γ `[m, z or 1, C, C]` and e^G `[m, 2 or 1, C, 1]` as the queries and the erase keys see them."""
    one = decay.inclusive.new_ones((), dtype=decay.dtype)
    read, look = kind.read_before, kind.look_before
    gamma, left = decay.weights(strict=read, before=read).unsqueeze(1), decay.from_start(one, read).unsqueeze(1)
    if look == read:
        return gamma, left
    return (
        torch.cat([gamma, decay.weights(True, look).unsqueeze(1)], 1),
        torch.cat([left, decay.from_start(one, look).unsqueeze(1)], 1),
    )


def gram(s: Segment) -> tuple[Tensor, bool]:
    """[N; M] = (Z Xᵀ) ⊙ Γ, `[m, 2C, J·C]`, and whether every step contracts: I - β k kᵀ with 0 ≤ β|k|² ≤ 1 up to rounding."""
    product = s.z @ s.x.mT
    contracts = False
    if s.strength is not None and product.device.type == "cpu":  # elsewhere reading a value would wait for the device
        low, high = as_grid(product, s)[:, 1, :, 0].diagonal(dim1=1, dim2=2).aminmax()
        contracts = bool(low >= 0) and bool(high <= 1 + 1e-5)
    return weighted(product, s), contracts


def weighted(pairs: Tensor, s: Segment) -> Tensor:
    """`[m, 2C, J·C]` ⊙ Γ, in place."""
    grid = as_grid(pairs, s)
    grid.mul_(s.gamma)
    grid[:, 1].diagonal(dim1=1, dim2=3).zero_()  # the erase does not see the token's own write
    return pairs


def as_grid(pairs: Tensor, s: Segment) -> Tensor:
    """`[m, 2C, J·C]` → `[m, 2, C, J, C]`."""
    return pairs.unflatten(2, (-1, s.chunk)).unflatten(1, (-1, s.chunk))


def scaled(rows: Tensor, weight: Tensor) -> Tensor:
    """`[m, J·C, K]` times one weight per token, `[m, J or 1, C, 1]`."""
    return (rows.unflatten(1, (-1, weight.shape[2])) * weight).flatten(1, 2)


def inverse(s: Segment, MN: Tensor, contracts: bool) -> Tensor:
    """T⁻¹ `[m, C, C]`.

    Where every step contracts, its entries are at most 1. Otherwise, for example where reflections (β near 2) meet nearly
    equal keys, a row can have many large ones, which amplify the rounding of M, so that both are made in float64.
    """
    C = s.chunk
    if contracts or s.z.device.type == "cpu":  # elsewhere reading a value would wait for the device
        found = unit_lower_inverse(MN[:, C:, :C])
        if contracts or bool(found.abs().sum(-1).amax() <= _SMALL_SUM):
            return found
    exact = (s.z[:, C:].double() @ s.x[:, :C].double().mT).mul_(s.gamma[:, -1, :, 0])
    return unit_lower_inverse(exact).to(s.z.dtype)
