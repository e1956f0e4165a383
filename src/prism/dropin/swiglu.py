"""The MLP of transformers' models, down(silu(gate(x)) ⊙ up(x)), in spans of tokens on a CPU.

Autograd keeps four tensors of the inner width and makes four more in the backward pass. This keeps two, and the rest lives
in the cache for one span. Maps that are more than a plain weight (LoRA, quantisation, hooks, a bias) are called as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.dropin.linear_maps import serves, times
from prism.dropin.plain import is_linear

_SPAN = 2**19
"""Numbers of the inner width in a span."""

Forward = Callable[..., Tensor]


def mlp(original: Forward) -> Forward:
    """Make the `forward` of an MLP with the maps `gate_proj`, `up_proj` and `down_proj` and the activation `act_fn`."""

    @functools.wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        maps = self.gate_proj, self.up_proj, self.down_proj
        if not serves(x) or not all(is_linear(each) for each in maps) or not _is_silu(self.act_fn):
            return original(self, x)
        return swiglu(x, *(each.weight for each in maps))

    return forward


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x `[…, K]` through the weights `gate` and `up` `[N, K]` and `down` `[M, N]`, `[…, M]`."""
    if torch.is_grad_enabled():
        return _SwiGLU.apply(x, gate, up, down)
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), len(down))
    for now in _spans(rows, gate):
        out[now] = times(F.silu(times(rows[now], gate), inplace=True).mul_(times(rows[now], up)), down)
    return out.view(*x.shape[:-1], len(down))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, kept = x.new_empty(len(rows), len(down)), []
        for now in _spans(rows, gate):
            g, u = times(rows[now], gate), times(rows[now], up)
            out[now] = times(F.silu(g).mul_(u), down)
            kept += [g, u]
        ctx.save_for_backward(x, gate, up, down, *kept)
        return out.view(*x.shape[:-1], len(down))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, gate, up, down) if z.requires_grad]
            again = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            return tuple(next(found) if z.requires_grad else None for z in (x, gate, up, down))
        rows, d_rows = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, len(down))
        d_x = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        d_gate, d_up, d_down = (
            torch.zeros_like(z) if needed else None
            for z, needed in zip((gate, up, down), ctx.needs_input_grad[1:], strict=True)
        )
        for now, g, u in zip(_spans(rows, gate), kept[::2], kept[1::2], strict=True):
            opened, d_h = F.silu(g), times(d_rows[now], down.t())
            if d_down is not None:
                d_down.addmm_(d_rows[now].t(), opened * u)
            d_u = opened.mul_(d_h)
            d_g = torch.ops.aten.silu_backward(d_h.mul_(u), g)
            if d_gate is not None:
                d_gate.addmm_(d_g.t(), rows[now])
            if d_up is not None:
                d_up.addmm_(d_u.t(), rows[now])
            if d_x is not None:
                torch.add(times(d_g, gate.t()), times(d_u, up.t()), out=d_x[now])
        return None if d_x is None else d_x.view_as(x), d_gate, d_up, d_down


def _spans(rows: Tensor, weight: Tensor) -> Iterator[slice]:
    """Spans of tokens."""
    length = max(1, _SPAN // len(weight))
    return (slice(start, start + length) for start in range(0, len(rows), length))


def _is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")  # torch's and transformers'
