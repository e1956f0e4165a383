"""Compute a block of C tokens as one affine map of its incoming state, and the parallel form as one block.

    S' = P S0 + D          O = F S0 + E

The four parts need no state, so those of all blocks are computed at once; only S' = P S0 + D is serial. Let
`R_i = b_iᵀ Diag(exp g_i) S_{i-1}` be what the erase of token i reads, and Γ the decay of a write until it is read (decay.py).
Then

    (I + tril(B Aᵀ ⊙ Γ, -1)) R = (B ⊙ e^G) S0 + Σ_l tril(B K_lᵀ ⊙ Γ, -1) W_l          one solve for any L
    O  = (Q ⊙ e^G) S0 - tril(Q Aᵀ ⊙ Γ) R + Σ_l tril(Q K_lᵀ ⊙ Γ) W_l
    S' = e^{G_C} S0 + Σ_j e^{G_C - G_j} ( - a_j R_jᵀ + Σ_l k_{l,j} w_{l,j}ᵀ )

and R = R₀ + R₁ S0 with the solve applied to both parts of its right-hand side. The solve is forward substitution: with
correlated keys an inverse by repeated squaring is wrong by orders of magnitude. Where the erase writes with the first key,
a = β k_1, it shares that key's columns: W_1 - βR is written.

The chunkwise form uses chunks as blocks (chunkwise.py). `parallel` takes the whole sequence as one block: one T×T
attention matrix per write, and for rules that erase one T×T solve. It is quadratic in T, comparable with softmax
attention, and a second oracle for the other forms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prism.engine.linear.decay import ChannelDecay, Documents, HeadDecay, Rows
from prism.engine.update import Steps, Update, steps_of


@dataclass(frozen=True)
class Blocks:
    """Steps in N blocks of C rows: `…` stands for `B, H, N`."""

    q: Tensor  # [..., C, K]
    k: Tensor  # [..., L, C, K]
    w: Tensor  # [..., L, C, V]
    log_decay: Tensor | None  # [..., C] or [..., C, K]
    a: Tensor | None  # [..., C, K]; None: an erase writes with the first key, times β
    b: Tensor | None  # [..., C, K]; None: an erase reads with the first key
    strength: Tensor | None  # β, [..., C]; None: 1
    reset: Tensor | None  # [B, 1, N, C]
    erase_decayed: bool
    read_after: bool

    @property
    def erases(self) -> bool:
        return self.b is not None or self.strength is not None

    def decay(self) -> HeadDecay | ChannelDecay:
        """The decays inside each block; zeros if there are none."""
        documents = None if self.reset is None else Documents(self.reset)
        if self.log_decay is None:
            return HeadDecay(self.q.new_zeros(self.q.shape[:-1]), documents)
        if self.log_decay.ndim == self.q.ndim:
            return ChannelDecay(self.log_decay, documents)
        return HeadDecay(self.log_decay, documents)


@dataclass(frozen=True)
class Affine:
    """S' = P S0 + D, O = F S0 + E. Without an erase P is diagonal and only its diagonal is kept."""

    P: Tensor | None  # [..., K, K]
    diagonal: Tensor  # [..., K] or [..., 1]: the decay alone
    D: Tensor  # [..., K, V]
    F: Tensor  # [..., C, K]
    E: Tensor  # [..., C, V]

    def chain(self, S: Tensor) -> tuple[Tensor, Tensor]:
        """The state each block starts from, `[B, H, N, K, V]`, and the one after the last, `[B, H, K, V]`."""
        return _chain(self.P, self.diagonal, self.D, S)


def affine(rows: Blocks) -> Affine:
    """The map of every block."""
    decay = rows.decay()
    read = Rows(rows.q, strict=not rows.read_after, before=not rows.read_after)
    # The L writes of a token are L columns of the same products.
    values = rows.w.flatten(-3, -2)  # [..., L·C, V]
    F, diagonal = decay.from_start(rows.q, read.before), decay.carry()
    if not rows.erases:
        (attention,) = decay.grams([read], rows.k)
        left_at_end = decay.to_end(rows.k).flatten(-3, -2)
        return Affine(None, diagonal, left_at_end.transpose(-1, -2) @ values, F, attention.flatten(-2) @ values)

    # The erase writes -βR with the first column: with the first key, or with a column of its own that has no values.
    C, (count, V) = rows.q.shape[-2], values.shape[-2:]
    b = rows.k[..., 0, :, :] if rows.b is None else rows.b
    columns = rows.k
    if rows.a is not None:
        columns = torch.cat([rows.a.unsqueeze(-3), rows.k], -3)
        values = torch.cat([torch.zeros_like(values[..., :C, :]), values], -2)
    look = Rows(b, strict=True, before=not rows.erase_decayed)
    lookup, attention = decay.grams([look, read], columns)  # [..., C, J, C]
    system = lookup[..., 0, :] if rows.strength is None else lookup[..., 0, :] * rows.strength.unsqueeze(-2)
    seen = torch.linalg.solve_triangular(  # [R₀ | R₁]
        system,
        torch.cat([lookup.flatten(-2)[..., -count:] @ values[..., -count:, :], decay.from_start(b, look.before)], -1),
        upper=False,
        unitriangular=True,
    )
    erased = seen if rows.strength is None else seen * rows.strength.unsqueeze(-1)
    R0, R1 = erased.split([V, erased.shape[-1] - V], -1)
    written = torch.cat([values[..., :C, :] - R0, values[..., C:, :]], -2)
    left_at_end = decay.to_end(columns)
    D = left_at_end.flatten(-3, -2).transpose(-1, -2) @ written
    P = torch.diag_embed(diagonal.expand(*diagonal.shape[:-1], rows.q.shape[-1]))
    P = P - left_at_end[..., 0, :, :].transpose(-1, -2) @ R1
    return Affine(P, diagonal, D, F - attention[..., 0, :] @ R1, attention.flatten(-2) @ written)


def incoming_states(rows: Blocks, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state each block starts from, `[B, H, N, K, V]`, and the one after the last; for rows that erase nothing."""
    decay = rows.decay()
    D = decay.to_end(rows.k).flatten(-3, -2).transpose(-1, -2) @ rows.w.flatten(-3, -2)
    return _chain(None, decay.carry(), D, S)


def _chain(P: Tensor | None, diagonal: Tensor, D: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    # `unbind` has one backward for all blocks; indexing would fill a tensor of full size with zeros for each.
    factors = (diagonal.unsqueeze(-1) if P is None else P).unbind(2)
    incoming = []
    for factor, written in zip(factors, D.unbind(2), strict=True):
        incoming.append(S)
        S = (factor * S if P is None else factor @ S) + written
    return torch.stack(incoming, 2), S


def to_blocks(steps: Steps, size: int) -> Blocks:
    """`[B, R, H, …]` → `[B, H, N, size, …]`, padded at the end with rows that are identities."""
    short = -steps.rows % size

    def split(x: Tensor | None, writes: bool = False) -> Tensor | None:
        if x is None:
            return None
        if short:
            x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
        x = x.unflatten(1, (-1, size)).movedim(3, 1)  # [B, H, N, C, ...]
        return x.movedim(-2, -3) if writes else x

    q, k, w = split(steps.q), split(steps.k, writes=True), split(steps.w, writes=True)
    assert q is not None and k is not None and w is not None
    reset = split(None if steps.reset is None else steps.reset.unsqueeze(2))
    return Blocks(
        q,
        k,
        w,
        split(steps.log_decay),
        split(steps.erase_write),
        split(steps.erase_key),
        split(steps.erase_strength),
        reset,
        steps.erase_decayed,
        steps.read_after,
    )


def from_blocks(o: Tensor, rows: int) -> Tensor:
    """`[B, H, N, C, V]` → `[B, R, H, V]`, the inverse of `to_blocks` for outputs."""
    return o.flatten(2, 3)[:, :, :rows].transpose(1, 2)


def parallel(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The whole sequence as one block. Returns `[B, T, H, V]` and the memory after the last token."""
    steps = steps_of(update)
    S = steps.initial(state)
    rows = to_blocks(steps, steps.rows)
    if update.erases:
        # The T×T system amplifies rounding where reflections (β near 2) meet nearly equal keys: this form is an oracle, so
        # it solves in float64. Shorter systems (chunkwise) do not need it.
        rows = replace(rows, **{name: x.double() for name, x in vars(rows).items() if _is_floating(x)})
    whole = affine(rows)
    incoming, end = whole.chain(S.to(whole.D.dtype))
    o = whole.F @ incoming + whole.E
    return steps.read(from_blocks(o, steps.rows)), end.to(S.dtype)


def _is_floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
