"""Convert an update to plain steps: one row per (sub-)step, all H heads in every tensor, padding as identities.

Every form starts here, so none of them handles masks, groups, sub-steps or low precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prism.engine.inputs import real_resets, repeat_heads, repeat_mask, zero_padding
from prism.engine.update import Update


@dataclass(frozen=True)
class Steps:
    """An update as R = T·n rows: `[B, R, H, …]` throughout, in the state's dtype.

    Without `erase_write` an erase writes with k's first key: a = β k_1 and b = k_1, or a = k_1 and `erase_key`.
    """

    q: Tensor  # [B, R, H, K]; [B, R, G, K] if groups of heads share queries and keys
    k: Tensor  # [B, R, H, L, K]; [B, R, G, L, K]
    w: Tensor  # [B, R, H, L, V]
    log_decay: Tensor | None  # [B, R, H] or [B, R, H, K]
    erase_key: Tensor | None  # b, [B, R, H, K]
    erase_write: Tensor | None  # a, [B, R, H, K]
    reset: Tensor | None  # [B, R]
    erase_decayed: bool
    read_after: bool
    substeps: int
    out_dtype: torch.dtype
    erase_strength: Tensor | None = None  # β, [B, R, H], where k's first key is erased

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def erases_with_first_key(self) -> bool:
        """Whether the erase shares the columns of k's first key: it has no `erase_write`."""
        return self.erase_write is None and (self.erase_key is not None or self.erase_strength is not None)

    def with_erase_columns(self) -> Steps:
        """The same steps with the erase as a and b."""
        if not self.erases_with_first_key:
            return self
        first = self.k[..., 0, :]
        b = first if self.erase_key is None else self.erase_key
        a = first if self.erase_strength is None else self.erase_strength.unsqueeze(-1) * first
        return replace(self, erase_key=b, erase_write=a, erase_strength=None)

    def read(self, o: Tensor) -> Tensor:
        """`[B, R, H, V]` → `[B, T, H, V]`: the row at which each token reads, in the caller's dtype."""
        if self.substeps > 1:
            o = o[:, self.substeps - 1 if self.read_after else 0 :: self.substeps]
        return o.to(self.out_dtype)

    def initial(self, state: Tensor | None) -> Tensor:
        """The incoming memory `[B, H, K, V]`, zeros if there is none."""
        if state is not None:
            return state.to(self.q.dtype)
        B, _, H, _, V = self.w.shape
        return self.q.new_zeros(B, H, self.q.shape[-1], V)

    def with_all_heads(self) -> Steps:
        """The same steps with q and k repeated to all heads."""
        heads = self.w.shape[2]
        return replace(self, q=repeat_heads(self.q, heads), k=repeat_heads(self.k, heads))


def resolve(u: Update) -> Steps:
    """The steps of an update, with the erase as a and b."""
    return resolve_keeping_first(u).with_erase_columns()


def resolve_keeping_first(u: Update, groups: bool = False) -> Steps:
    """The steps of an update. An erase that is declared to write with the first key has no `erase_write`.

    With `groups` q and k have one head for each group of heads that shares both.
    """
    n, H, dtype = u.substeps, u.heads, u.state_dtype
    shared = max(u.q.shape[2], u.k.shape[2])
    if not groups or shared % u.q.shape[2] or shared % u.k.shape[2]:
        shared = H
    per_row = repeat_mask(u.mask, n)

    def prepare(x: Tensor | None, mask: Tensor | None, heads: int = H) -> Tensor | None:
        return None if x is None else repeat_heads(zero_padding(x.to(dtype), mask), heads)

    q, g = prepare(u.q, u.mask, shared), prepare(u.log_decay, u.mask)
    k, w = prepare(u.k, per_row, shared), prepare(u.w, per_row)
    a = None if u.erase_write_first else prepare(u.erase_write, per_row)
    b = None if u.erase_first else prepare(u.erase_key, per_row)
    beta = prepare(u.erase_strength, per_row)
    if beta is not None and b is not None:
        a = beta.unsqueeze(-1) * b
    reset = real_resets(u.reset, u.mask)
    assert q is not None and k is not None and w is not None
    first, last = 0, n - 1
    return Steps(
        q=at_substep(q, n, last if u.read == "after" else first),
        k=k,
        w=w,
        log_decay=None if g is None else at_substep(g, n, first),
        erase_key=b,
        erase_write=a,
        reset=None if reset is None else at_substep(reset, n, first),
        erase_decayed=u.erase_on == "decayed",
        read_after=u.read == "after",
        substeps=n,
        out_dtype=u.w.dtype,
        erase_strength=beta if u.erase_first else None,
    )


def at_substep(x: Tensor, n: int, position: int) -> Tensor:
    """`[B, T, …]` → `[B, T·n, …]`: x at one sub-step of each token, zero (False) at the others."""
    if n == 1:
        return x
    zero = torch.zeros_like(x)
    return torch.stack([x if j == position else zero for j in range(n)], 2).flatten(1, 2)
