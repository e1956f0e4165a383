"""Align rows whose mini-batches begin at different tokens.

A row may enter with a partial mini-batch, and every document begins a new one. `Layout` gives each token a slot in one of N
mini-batches of b slots such that slots mean the same in all rows: slot i is the i-th token of its mini-batch. Empty slots
(taken by earlier tokens, not reached, or padding) hold zeros, which learn and forget nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.networks.update import InnerUpdate

Examples = tuple[Tensor, Tensor, Tensor]
"""k, v and rate."""


@dataclass(frozen=True)
class Layout:
    """Where T tokens go in N mini-batches. None: tokens fill the slots in order, and no document begins."""

    size: int
    """b, slots in a mini-batch."""
    count: int
    """N, mini-batches."""
    tokens: int
    """T."""
    slot: Tensor | None = None
    """`[B, T]`, each token's slot, counted through all mini-batches."""
    token: Tensor | None = None
    """`[B, N·b]`, the token in each slot (T: none)."""
    fresh: Tensor | None = None
    """`[N, B]`, whether a document begins with this mini-batch."""
    full: Tensor | None = None
    """`[N, B]`, whether the last slot is taken."""
    first: Tensor | None = None
    """`[N, B]`, the first token of each mini-batch."""
    origin: Tensor | None = None
    """`[N, B]`, the place of that token in its mini-batch."""

    def is_full(self, n: int) -> Tensor | bool:
        """Whether the last slot of mini-batch n is taken, for all rows, or `[B]`."""
        return self.tokens >= (n + 1) * self.size if self.full is None else self.full[n]

    def to_chunks(self, x: Tensor) -> Tensor:
        """`[B, T, H, …]` → `[N, B, H, b, …]`, zero in empty slots."""
        if self.token is None:
            short = self.count * self.size - self.tokens
            x = F.pad(x, (*[0] * (2 * x.ndim - 4), 0, short)) if short else x
        else:
            x = F.pad(x, (*[0] * (2 * x.ndim - 4), 0, 1))
            x = take(x, self.token)
        return x.unflatten(1, (self.count, self.size)).transpose(0, 1).transpose(2, 3).contiguous()

    def from_chunks(self, x: Tensor) -> Tensor:
        """`[N, B, H, b, …]` → `[B, T, H, …]`, the inverse of `to_chunks`."""
        x = x.transpose(2, 3).transpose(0, 1).flatten(1, 2)
        return x[:, : self.tokens] if self.slot is None else take(x, self.slot)

    def before(self, x: Tensor, count: int) -> Tensor:
        """`[B, count + T, H, …]`, earlier tokens first → `[N, B, H, count, …]`: the tokens before each mini-batch."""
        if self.first is None:
            parts = [x[:, n * self.size : n * self.size + count] for n in range(self.count)]
            padded = [F.pad(p, (*[0] * (2 * x.ndim - 4), 0, count - p.shape[1])) for p in parts]
            return torch.stack(padded).transpose(2, 3)
        index = self.first[..., None] + torch.arange(count, device=x.device)  # [N, B, count]
        flat = index.transpose(0, 1).flatten(1)
        return take(x, flat).unflatten(1, (self.count, count)).transpose(0, 1).transpose(2, 3)


def align(
    tokens: int, size: int, position: Tensor | None, reset: Tensor | None, mask: Tensor | None, like: Tensor
) -> Layout:
    """Arrange T tokens in mini-batches of `size`, rows starting at `position` `[B]`; `like` `[B, …]` gives batch and device.

    With `reset` the number of mini-batches depends on where documents begin. It is read from the tensor, which waits for
    a GPU.
    """
    if position is None and reset is None and mask is None:
        return Layout(size, -(-tokens // size), tokens)
    place = places(tokens, size, position, reset, like)
    begins = place == 0
    begins[:, 0] = True
    number = begins.long().cumsum(1) - 1  # of each token's mini-batch
    most = tokens if position is None else tokens + size - 1
    count = -(-most // size) if reset is None else int(number.max()) + 1
    slot = number * size + place
    real = torch.ones_like(begins) if mask is None else mask
    index = torch.arange(tokens, device=like.device).expand_as(slot)

    def scatter(width: int, where: Tensor, what: Tensor, chosen: Tensor, empty: int) -> Tensor:
        """`[B, width]`: `what` at `where` for the chosen tokens, `empty` elsewhere."""
        out = torch.full((slot.shape[0], width + 1), empty, device=slot.device)
        return out.scatter_(1, torch.where(chosen, where, width), what)[:, :-1]

    token = scatter(count * size, slot, index, real, tokens)
    leads = begins & real
    fresh = None if reset is None else scatter(count, number, reset.long(), leads, 0).bool().T
    return Layout(
        size,
        count,
        tokens,
        slot=slot.clamp(max=count * size - 1),
        token=token,
        fresh=fresh,
        full=(token[:, size - 1 :: size] < tokens).T,
        first=scatter(count, number, index, leads, 0).T,
        origin=scatter(count, number, place, leads, 0).T,
    )


def places(tokens: int, size: int, position: Tensor | None, reset: Tensor | None, like: Tensor) -> Tensor:
    """`[B, T]`, each token's place in its mini-batch of `size`; `like` `[B, …]` gives batch and device."""
    index = torch.arange(tokens, device=like.device).expand(like.shape[0], tokens)
    place = index if position is None else index + position[:, None]
    if reset is not None:
        began = torch.where(reset, index, -1).cummax(1).values
        place = torch.where(began >= 0, index - began, place)
    return place % size


def position_after(place: Tensor, size: int, position: Tensor | None, mask: Tensor | None) -> Tensor:
    """`[B]`, how many tokens the partial mini-batch has after the last real token."""
    if mask is None:
        return (place[:, -1] + 1) % size
    before = torch.zeros_like(place[:, 0]) if position is None else position
    following = torch.cat([before[:, None], (place + 1) % size], 1)
    return following.gather(1, mask.sum(1, keepdim=True))[:, 0]


def earlier_examples(u: InnerUpdate, layout: Layout, window: tuple[Tensor, ...]) -> tuple[Examples, Examples]:
    """The last c - 1 examples before each mini-batch, `[N, B, H, c - 1, …]`, and before the next call, `[B, c - 1, H, …]`.

    ATLAS uses them again. An example of another document gets rate 0.
    """
    count = u.window - 1
    k, v, rate = (torch.cat([old, new], 1) for old, new in zip(window, (u.k, u.v, u.rate), strict=True))
    real = torch.full((u.batch,), u.tokens, device=u.q.device) if u.mask is None else u.mask.sum(1)
    last = real[:, None] + torch.arange(count, device=u.q.device)
    shared, kept = layout.before(rate, count), take(rate, last)
    if u.reset is not None and layout.first is not None:
        document = F.pad(u.reset.long().cumsum(1), (count, 0))
        own = document.gather(1, layout.first.T + count).T  # of each mini-batch's first token
        shared = torch.where(layout.before(document.unsqueeze(-1), count) == own[..., None, None], shared, 0.0)
        final = document.gather(1, last)
        kept = torch.where((final == final[:, -1:]).unsqueeze(-1), kept, 0.0)
    before = (layout.before(k, count), layout.before(v, count), shared)
    return before, (take(k, last), take(v, last), kept)


def take(x: Tensor, index: Tensor) -> Tensor:
    """`[B, T, …]`, `[B, S]` → `[B, S, …]`: place i of row b takes token index[b, i]."""
    return x.gather(1, index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
