"""Compute a block of C tokens as one affine map of its incoming state, and the parallel form as one block.

    S' = P S0 + D          O = F S0 + E

The four parts need no state, so those of all blocks are computed at once; only S' = P S0 + D is serial. Let
`R_i = b_iᵀ Diag(exp g_i) S_{i-1}` be what the erase of token i reads, and Γ the decay of a write until it is read (decay.py).
Then

    (I + tril(B Aᵀ ⊙ Γ, -1)) R = (B ⊙ e^G) S0 + Σ_l tril(B K_lᵀ ⊙ Γ, -1) W_l          one solve for any L
    O  = (Q ⊙ e^G) S0 - tril(Q Aᵀ ⊙ Γ) R + Σ_l tril(Q K_lᵀ ⊙ Γ) W_l
    S' = e^{G_C} S0 + Σ_j e^{G_C - G_j} ( - a_j R_jᵀ + Σ_l k_{l,j} w_{l,j}ᵀ )

and R = R₀ + R₁ S0 with the solve applied to both parts of its right-hand side. The solve is forward substitution: with
correlated keys an inverse by repeated squaring is wrong by orders of magnitude.

The chunkwise form uses chunks as blocks (chunkwise.py). `parallel` takes the whole sequence as one block: one T×T
attention matrix per write, and for rules that erase one T×T solve. It is quadratic in T, comparable with softmax
attention, and a second oracle for the other forms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prism.engine.linear.decay import ChannelDecay, Documents, HeadDecay
from prism.engine.linear.steps import Steps, resolve
from prism.engine.update import Update


@dataclass(frozen=True)
class Blocks:
    """Steps in N blocks of C rows: `…` stands for `B, H, N`."""

    q: Tensor  # [..., C, K]
    k: Tensor  # [..., L, C, K]
    w: Tensor  # [..., L, C, V]
    log_decay: Tensor | None  # [..., C] or [..., C, K]
    a: Tensor | None  # [..., C, K]
    b: Tensor | None  # [..., C, K]
    reset: Tensor | None  # [B, 1, N, C]
    erase_decayed: bool
    read_after: bool

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

    def advance(self, n: int, S: Tensor) -> Tensor:
        """The state after block n, `[B, H, K, V]`."""
        if self.P is None:
            return self.diagonal[:, :, n].unsqueeze(-1) * S + self.D[:, :, n]
        return self.P[:, :, n] @ S + self.D[:, :, n]


def affine(rows: Blocks) -> Affine:
    """The map of every block."""
    decay = rows.decay()
    before = not rows.read_after
    # The L writes of a token are L columns of the same products.
    values = rows.w.flatten(-3, -2)  # [..., L·C, V]
    attention = _wide(decay.gram(rows.q, rows.k, strict=before, before=before))
    left_at_end = decay.to_end(rows.k).flatten(-3, -2)
    F, E = decay.from_start(rows.q, before), attention @ values
    D, diagonal = left_at_end.transpose(-1, -2) @ values, decay.carry()
    if rows.a is None or rows.b is None:
        return Affine(None, diagonal, D, F, E)

    look_before = not rows.erase_decayed
    lookup = decay.gram(rows.b, torch.cat([rows.a.unsqueeze(-3), rows.k], -3), strict=True, before=look_before)
    V = values.shape[-1]
    seen = torch.linalg.solve_triangular(  # [R₀ | R₁]
        lookup[..., 0, :, :],
        torch.cat([_wide(lookup[..., 1:, :, :]) @ values, decay.from_start(rows.b, look_before)], -1),
        upper=False,
        unitriangular=True,
    )
    erased = decay.to_end(rows.a.unsqueeze(-3)).squeeze(-3).transpose(-1, -2) @ seen  # [..., K, V + K]
    unread = decay.gram(rows.q, rows.a.unsqueeze(-3), strict=before, before=before).squeeze(-3) @ seen
    K = rows.q.shape[-1]
    P = torch.diag_embed(diagonal.expand(*diagonal.shape[:-1], K)) - erased[..., V:]
    return Affine(P, diagonal, D - erased[..., :V], F - unread[..., V:], E - unread[..., :V])


def incoming_states(rows: Blocks, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state each block starts from, `[B, H, N, K, V]`, and the one after the last; for rows that erase nothing."""
    decay = rows.decay()
    kept = decay.carry().unsqueeze(-1)
    D = decay.to_end(rows.k).flatten(-3, -2).transpose(-1, -2) @ rows.w.flatten(-3, -2)
    incoming = []
    for n in range(D.shape[2]):
        incoming.append(S)
        S = kept[:, :, n] * S + D[:, :, n]
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
        reset,
        steps.erase_decayed,
        steps.read_after,
    )


def from_blocks(o: Tensor, rows: int) -> Tensor:
    """`[B, H, N, C, V]` → `[B, R, H, V]`, the inverse of `to_blocks` for outputs."""
    return o.flatten(2, 3)[:, :, :rows].transpose(1, 2)


def _wide(gram: Tensor) -> Tensor:
    """`[…, J, C, C]` → `[…, C, J·C]`: the J grams side by side."""
    return gram.transpose(-3, -2).flatten(-2, -1)


def parallel(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The whole sequence as one block. Returns `[B, T, H, V]` and the memory after the last token."""
    steps = resolve(update)
    S = steps.initial(state)
    rows = to_blocks(steps, steps.rows)
    if update.erases:
        # The T×T system amplifies rounding where reflections (β near 2) meet nearly equal keys: this form is an oracle, so
        # it solves in float64. Shorter systems (chunkwise) do not need it.
        rows = replace(rows, **{name: x.double() for name, x in vars(rows).items() if _is_floating(x)})
    whole = affine(rows)
    o = whole.F @ S.unsqueeze(2).to(whole.F.dtype) + whole.E
    end = whole.advance(0, S.to(whole.D.dtype))
    return steps.read(from_blocks(o, steps.rows)), end.to(S.dtype)


def _is_floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
