"""One sequence across processes: each computes its part, and they exchange what memories need, gradients included.

A group of N processes holds a sequence of T tokens, process r the r-th part, in order. Three exchanges serve every memory:

    previous   what the part before this one ends with: the tokens in a convolution's window, a shifted token
    chain      a memory: S_in of part r+1 is S_out = P S_in + D of part r, where S ↦ P S + D is the part's affine map
    gather     a few numbers of every part, without gradients: positions, mLSTM's stabiliser

Every process computes the affine map of its part without knowing S. The states then run through the maps, and each process
adds what its tokens read of the incoming one:

    linear         O = O₀ + F S_in: O₀ and D from an empty memory; F and P from the identity, without writes
    diagonal       D from an empty state and P from the decays, then the outputs from the incoming state: two passes
    slots, mesa    P and D as in a linear memory without erase; the read is not linear in S, so it runs once, from S_in
    window         the cache is the last window - 1 tokens: the previous part's, if it has so many

The map of tokens that erase is computed by the engine itself, in any form and on any backend: a memory with K values that
writes nothing and starts from the identity ends as P and reads F. Without an erase F and P are decays.

Design choices
- P and D are computed by all processes at once. Only P S_in + D runs in order, one product per process, and only S_out is
  sent: one state per border, forwards, and its gradient backwards. An all-gather of all P and D would send N - 1 times as
  much, and P, which is as large as the state, on top of it.
- The gradient runs the same chain from the last process to the first, with P transposed. It is exact.
- Every process builds the same graph, whatever its place: autograd runs nodes in the reverse of the order in which they
  were made, so sends and receives meet in the backward pass too, also where activations are recomputed.
- The exchanges block. Compiled code is interrupted for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prism.engine.inputs import real_resets, repeat_heads, zero_padding
from prism.engine.linear.scan import apply_map, is_diagonal
from prism.engine.memories.attention import Attend, Cache, advance, append
from prism.engine.memories.diagonal import Diagonal, as_real, total_decay
from prism.engine.memories.least_squares import LeastSquares
from prism.engine.memories.slots import Memories, Slots
from prism.engine.memory import memory
from prism.engine.update import Update


@dataclass(frozen=True)
class Context:
    """The processes that share a sequence, in the order of its parts.

    Args:
        group: their process group, as `torch.distributed.new_group` returns it.
    """

    group: Any

    @property
    def rank(self) -> int:
        """Which part this process has, from 0."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of parts."""
        return dist.get_world_size(self.group)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def part(self, tokens: int) -> slice:
        """This process's tokens of a sequence. Parts differ by at most one token; the first ones are longer."""
        least, longer = divmod(tokens, self.size)
        start = self.rank * least + min(self.rank, longer)
        return slice(start, start + least + (self.rank < longer))

    def previous(self, own: Tensor, first: Tensor | None) -> Tensor:
        """The part before this one's `own`; for the first part, `first` (None: zeros). All have the same shape."""
        result: Tensor = _Previous.apply(self, own, torch.zeros_like(own) if first is None else first.to(own.dtype))
        return result

    def chain(self, P: Tensor, D: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state before this part and the one after it.

        Args:
            P: the matrix of this part's map S ↦ P S + D, or its diagonal (as in linear/scan.py).
            D: the state after this part if it starts from an empty one.
            first: the state before the first part, which alone reads it; None: an empty one.
        """
        start: Tensor
        end: Tensor
        start, end = _Chain.apply(self, P, D, torch.zeros_like(D) if first is None else first.to(D.dtype))
        return start, end

    def gather(self, x: Tensor) -> list[Tensor]:
        """The `x` of every part, in order; of one shape, without gradients."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.detach().contiguous(), self.group)
        return parts

    def send(self, x: Tensor, step: int) -> Any:
        """Start to send x `step` parts ahead; wait for the result before x changes."""
        return dist.isend(_plain(x), dist.get_global_rank(self.group, self.rank + step), self.group)

    def receive(self, like: Tensor, step: int) -> Tensor:
        """A tensor like this one, from `step` parts ahead."""
        x = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(_plain(x), dist.get_global_rank(self.group, self.rank + step), self.group)
        return x


@dataclass(frozen=True)
class SequenceParallel:
    """How a memory runs over a sequence that processes share, a part in each."""

    run: Callable[[Any, Any, str, str, Context], tuple[Any, Any]]
    """(update, state before the first part, form, backend, processes) → the outputs of this part and the state after it."""
    refuses: Callable[[Any], str | None] = lambda update: None
    """Says in one clause why the sequence of an update cannot be shared; None if it can."""
    shortest: Callable[[Any], int] = lambda update: 1
    """The fewest tokens that a part must have, given an update."""


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
    """Why processes cannot share a sequence of attention, in one clause; None if it has a window."""
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


def _plain(x: Tensor) -> Tensor:
    """x as process groups accept it: contiguous and real."""
    return (torch.view_as_real(x) if x.is_complex() else x).contiguous()


class _Previous(torch.autograd.Function):
    """Tensors move one part ahead; their gradients move one part back."""

    @staticmethod
    def forward(ctx: Any, context: Context, own: Tensor, first: Tensor) -> Tensor:
        ctx.context = context
        sent = None if context.last else context.send(own, 1)
        received = first.clone() if context.first else context.receive(own, -1)
        if sent is not None:
            sent.wait()
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, (gradient,) = ctx.context, gradients
        sent = None if context.first else context.send(gradient, -1)
        own = torch.zeros_like(gradient) if context.last else context.receive(gradient, 1)
        if sent is not None:
            sent.wait()
        return None, own, gradient if context.first else None


class _Chain(torch.autograd.Function):
    """States run from the first part to the last; their gradients run back."""

    @staticmethod
    def forward(ctx: Any, context: Context, P: Tensor, D: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        start = first.clone() if context.first else context.receive(D, -1)
        end = apply_map(P, start) + D
        if not context.last:
            context.send(end, 1).wait()
        ctx.context = context
        ctx.save_for_backward(P, start)
        return start, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        context, (d_start, d_end) = ctx.context, gradients
        P, start = ctx.saved_tensors
        if not context.last:
            d_end = d_end + context.receive(d_end, 1)
        if is_diagonal(P, start):
            d_P = (d_end * start.conj()).sum_to_size(P.shape)
            d_start = d_start + P.conj() * d_end
        else:
            d_P = d_end @ start.mH
            d_start = d_start + P.mH @ d_end
        if not context.first:
            context.send(d_start, -1).wait()
        return None, d_P, d_end, d_start if context.first else None
