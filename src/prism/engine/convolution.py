"""The diagonal recurrence as a convolution, where decay, write and read are the same at every token (S4D).

    o_t = Re Σ_n r_n a_n^{t+1} h_n  +  Σ_{j≤t} K_{t-j} u_j          K_l = Re Σ_n r_n a_n^l b_n

through the FFT, padded to twice the length. Documents become rows of their own: nothing is convolved across a border.
Powers of a are found in float64, because a phase of thousands of radians has no meaning in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prism.engine.diagonal import Diagonal, factors, hand_on


def refuses(update: Diagonal) -> str | None:
    steady = update.log_decay is not None and len(update.shape) == 4 and update.read is not None
    u, *rest = factors(update.write)
    for x in (*rest, *factors(update.log_decay), *factors(update.read)):
        steady = steady and x.shape[:2] == (1, 1)
    if steady and rest and u.shape[-1] == 1 and not u.is_complex():
        return None
    return "convolves only if decay, write and read are the same at every token"


def convolution(update: Diagonal, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, D]` and the state after the last token, for states `[B, D, N]`."""
    rows = Rows.of(update)
    u = rows.lay(factors(update.write)[0].squeeze(-1).to(update.real_dtype))  # [B, n, L, D]
    L = u.shape[2]
    g, b, r = (_constant(update, name) for name in ("log_decay", "write", "read"))
    powers = _powers(g, torch.arange(L + 1, device=u.device), update.dtype)  # [L + 1, D, N]
    kernel = (r * b * powers[:-1]).sum(-1).real  # [L, D]
    spectrum = torch.fft.rfft(u, 2 * L, dim=2) * torch.fft.rfft(kernel, 2 * L, dim=0)
    o = torch.fft.irfft(spectrum, 2 * L, dim=2)[:, :, :L]

    last, length = rows.last_document(u)  # [B, L, D] that end at the right, [B]
    h = torch.einsum("bld,ldn->bdn", last.to(update.dtype), b * powers[:-1].flip(0))
    if state is not None:
        h0 = update.initial(state)
        # Only the first document of a row goes on from what came before.
        seen = torch.einsum("bdn,ldn->bld", h0, r * powers[1:]).real
        o = torch.cat([o[:, :1] + seen.unsqueeze(1), o[:, 1:]], 1)
        h = h + rows.if_continued(_powers(g, length, update.dtype) * h0)
    return update.answer(rows.restore(o)), hand_on(h)


@dataclass(frozen=True)
class Rows:
    """Where a token `[B, T]` goes in `[B, n, L]`: n documents a sequence, L tokens in the longest. None: where it is."""

    document: Tensor | None
    place: Tensor | None
    real: Tensor | None
    count: int
    length: int

    @classmethod
    def of(cls, u: Diagonal) -> Rows:
        B, T = u.shape[:2]
        if u.reset is None and u.mask is None:
            return cls(None, None, None, 1, T)
        device = factors(u.write)[0].device
        real = torch.ones(B, T, dtype=torch.bool, device=device) if u.mask is None else u.mask
        begins = torch.zeros_like(real) if u.reset is None else u.reset & real
        document, seen = begins.long().cumsum(1), real.long().cumsum(1)
        place = seen - 1 - torch.where(begins, seen - 1, 0).cummax(1).values
        return cls(document, place.clamp(min=0), real, int(document.max()) + 1, int(place.max().clamp(min=0)) + 1)

    def if_continued(self, h: Tensor) -> Tensor:
        """`[B, D, N]`, zero where the last document is not the one that began before."""
        return h if self.document is None else torch.where((self.document[:, -1] == 0)[:, None, None], h, 0.0)

    def lay(self, u: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, n, L, D]`, zero where no token is."""
        if self.document is None:
            return u.unsqueeze(1)
        B, _, D = u.shape
        slots = u.new_zeros(B * self.count * self.length + 1, D)  # the last one takes what is padding
        return slots.index_copy(0, self._slot(B), u.flatten(0, 1))[:-1].view(B, self.count, self.length, D)

    def restore(self, o: Tensor) -> Tensor:
        """`[B, n, L, D]` → `[B, T, D]`."""
        if self.document is None:
            return o.squeeze(1)
        B, D = o.shape[0], o.shape[-1]
        flat = torch.cat([o.reshape(-1, D), o.new_zeros(1, D)])
        return flat[self._slot(B)].view(B, -1, D)

    def last_document(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The last document of each row, moved to the right, and its length."""
        B, _, L, D = u.shape
        if self.document is None or self.real is None:
            return u[:, 0], torch.full((B,), L, device=u.device)
        current = self.document[:, -1:]
        length = (self.real & (self.document == current)).sum(1)
        own = u[torch.arange(B, device=u.device), current[:, 0]]
        index = torch.arange(L, device=u.device) - (L - length)[:, None]
        moved = own.gather(1, index.clamp(min=0).unsqueeze(-1).expand(-1, -1, D))
        return torch.where((index >= 0).unsqueeze(-1), moved, 0.0), length

    def _slot(self, batch: int) -> Tensor:
        assert self.document is not None and self.place is not None and self.real is not None
        row = torch.arange(batch, device=self.place.device)[:, None] * self.count + self.document
        return torch.where(self.real, row * self.length + self.place, batch * self.count * self.length).flatten()


def _constant(u: Diagonal, name: str) -> Tensor:
    """`[D, N]`: the product of what does not depend on the token."""
    parts = factors(getattr(u, name))
    product = torch.ones((), dtype=u.dtype, device=parts[0].device)
    for x in parts[1:] if name == "write" else parts:
        product = product * x[0, 0]
    return product


def _powers(log_decay: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """a^e, `[len(e), D, N]`."""
    wide = torch.promote_types(dtype, torch.float64)
    return (exponents.view(-1, 1, 1) * log_decay.to(wide)).exp().to(dtype)
