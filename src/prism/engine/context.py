"""One sequence across processes: this process's part, and what it exchanges with the others, gradients included.

A group of N processes holds a sequence of T tokens, process r the r-th part, in order. Three exchanges serve every memory:

    previous   what the part before this one ends with: the tokens in a convolution's window, a shifted token
    chain      a memory: S_in of part r+1 is S_out = P S_in + D of part r, where S ↦ P S + D is the part's affine map
    gather     a few numbers of every part, without gradients: positions, mLSTM's stabiliser

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

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prism.engine.linear.scan import apply_map, is_diagonal


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
