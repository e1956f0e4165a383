"""Memories over a sequence that is cut into parts, one per process: how each passes its state from part to part.

Every process computes the affine map S ↦ P S + D of its part without knowing S. The states then run through the maps
(`Context.chain`), and each process adds what its tokens read of the incoming one:

    linear         O = O₀ + F S_in: O₀ and D from an empty memory; F and P from the identity, without writes
    diagonal       D from an empty state and P from the decays, then the outputs from the incoming state: two passes
    slots, mesa    P and D as in a linear memory without erase; the read is not linear in S, so it runs once, from S_in
    window         the cache is the last window - 1 tokens: the previous part's, if it has so many

The map of tokens that erase is computed by the engine itself, in any form and on any backend: a memory with K values that
writes nothing and starts from the identity ends as P and reads F. Without an erase F and P are decays.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prism.engine.context import Context
from prism.engine.dispatch import memory
from prism.engine.inputs import real_resets, repeat_heads, zero_padding
from prism.engine.memories.attention import Attend, Cache, advance, append
from prism.engine.memories.diagonal import Diagonal, as_real, total_decay
from prism.engine.memories.least_squares import LeastSquares
from prism.engine.memories.slots import Memories, Slots
from prism.engine.update import Update


def linear(u: Update, state: Tensor | None, form: str, backend: str, context: Context) -> tuple[Tensor, Tensor]:
    """The outputs `[B, T, H, V]` of this part's tokens, and the memory `[B, H, K, V]` after them."""
    o, written = memory(u, None, form, backend)
    if not u.erases:
        start, end = context.chain(kept(u), written, state)
        return _add_seen(o, u, start), end
    nothing = u.w.new_zeros(u.batch, u.w.shape[1], u.heads, 1, u.key_dim)
    identity = torch.eye(u.key_dim, dtype=u.state_dtype, device=u.w.device).expand(u.batch, u.heads, -1, -1)
    F, P = memory(replace(u, k=u.k[:, :, :, :1], w=nothing), identity, form, backend)
    start, end = context.chain(P, written, state)
    return o + _read(F, start), end


def diagonal(u: Diagonal, state: Tensor | None, form: str, backend: str, context: Context) -> tuple[Tensor, Tensor]:
    """The outputs of this part's tokens, and the state `[B, *S]` after them."""
    shape = (u.shape[0], *u.shape[2:])
    column = (u.shape[0], 1, -1, 1)  # every number is a memory of its own: K = the size of S, V = 1
    written = u.initial(memory(u, None, form, backend)[1])
    first = None if state is None else u.initial(state).reshape(column)
    start, end = context.chain(total_decay(u).reshape(column), written.reshape(column), first)
    o, _ = memory(u, as_real(start.view(shape)), form, backend)
    return o, as_real(end.view(shape))


def slots(u: Slots, state: Memories | None, form: str, backend: str, context: Context) -> tuple[Tensor, Memories]:
    """The outputs `[B, T, H, V]` of this part's tokens, and both memories after them."""
    both = u.written(torch.cat([u.k, u.v], -1))
    first = None if state is None else torch.cat([state["keys"], state["values"]], -1)
    start, end = context.chain(kept(both), memory(both, None, "auto", backend)[1], first)
    sizes = [u.k.shape[-1], u.v.shape[-1]]
    o, _ = memory(u, dict(zip(("keys", "values"), start.split(sizes, -1), strict=True)), form, backend)
    return o, dict(zip(("keys", "values"), end.split(sizes, -1), strict=True))


def least_squares(
    u: LeastSquares, state: Tensor | None, form: str, backend: str, context: Context
) -> tuple[Tensor, Tensor]:
    """The outputs `[B, T, H, V]` of this part's tokens, and the memory `[B, H, K, V + K]` after them."""
    start, end = context.chain(kept(u.linear), memory(u.linear, None, "auto", backend)[1], state)
    return memory(u, start, form, backend)[0], end


def window(u: Attend, state: Cache | None, form: str, backend: str, context: Context) -> tuple[Tensor, Cache]:
    """The outputs `[B, T, H, V]` of this part's tokens, and the cache after them."""
    empty = u.initial(None)
    own = advance(u, append(u, empty), empty)
    first = empty if state is None else u.initial(state)
    start = {name: context.previous(own[name], first[name]) for name in ("k", "v")}
    lengths = context.gather(own["length"])
    return memory(
        u, {**start, "length": first["length"] if context.first else lengths[context.rank - 1]}, form, backend
    )


def window_refuses(u: Attend) -> str | None:
    """Why attention cannot be cut, in one clause; None if it has a window."""
    return "sees all earlier tokens, which other processes hold" if u.window is None else None


def kept(u: Update) -> Tensor:
    """P of T tokens that erase nothing: what is left of the incoming state, a diagonal `[B, H, K, 1]` or `[B, H, 1, 1]`."""
    return _decay(u)[:, -1]


def _add_seen(o: Tensor, u: Update, S: Tensor) -> Tensor:
    """The outputs o `[B, T, H, V]`, and what the queries of tokens that erase nothing read of the incoming state."""
    q = repeat_heads(zero_padding(u.q.to(o.dtype), u.mask), u.heads)
    decay = _decay(u).squeeze(-1)
    if u.read == "before":
        decay = torch.cat([torch.ones_like(decay[:, :1]), decay[:, :-1]], 1)
        reset = real_resets(u.reset, u.mask)
        if reset is not None:  # a document starts with a read of nothing
            decay = torch.where(reset[:, :, None, None], 0.0, decay)
    decay = decay.to(o.dtype)
    return torch.addcmul(o, decay, _read(q, S)) if decay.shape[-1] == 1 else o + _read(q * decay, S)


def _decay(u: Update) -> Tensor:
    """What is left of the incoming state after each token, `[B, T, H, K, 1]` or `[B, T, H, 1, 1]`: zero from a reset on."""
    if u.log_decay is None:
        decay = torch.ones(u.batch, u.tokens, u.heads, 1, dtype=u.state_dtype, device=u.w.device)
    else:
        g = zero_padding(u.log_decay if u.per_channel else u.log_decay.unsqueeze(-1), u.mask)
        # A long sum, so in float64. Along the last dimension, because a GPU sums along others one token after the other.
        total = g.double().movedim(1, -1).contiguous().cumsum(-1).movedim(-1, 1)
        decay = total.to(u.state_dtype).exp()
    reset = real_resets(u.reset, u.mask)
    if reset is not None:
        decay = torch.where(reset.cumsum(1)[:, :, None, None] > 0, 0.0, decay)
    return decay.unsqueeze(-1)


def _read(q: Tensor, S: Tensor) -> Tensor:
    """`[B, T, H, K]`, `[B, H, K, V]` → `[B, T, H, V]`, in q's dtype: products in half precision add up in float32."""
    return (q.transpose(1, 2) @ S.to(q.dtype)).transpose(1, 2)
