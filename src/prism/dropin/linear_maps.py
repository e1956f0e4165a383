"""Linear maps and MLPs of many tokens on a CPU, from the weights of their modules.

Maps: torch computes them by MKL. With two threads of an AMD EPYC, oneDNN was faster by about a sixth, and by more where
another process held a core. A convolution with one tap is the way to it.

MLPs, down(silu(gate(x)) ⊙ up(x)): autograd keeps four tensors of the inner width and makes four more in the backward pass.
This keeps two, and the rest lives in the cache for one span of tokens.

LoRA, quantisation, offloading and hooks change what a module's call does. Where one of them may be at work, it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkldnn as _mkldnn

from prism.dropin.norms import traced
from prism.engine import compat

_FEW = 256
"""Fewer tokens stay with torch: preparing the weights for oneDNN costs more than it gains."""
_SPAN = 2**19
"""Numbers of the inner width in a span."""

Forward = Callable[..., Tensor]


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """What `module(x)` computes, x `[…, K]`. A module that is more than a linear map without a bias is called."""
    if not serves(x) or not is_linear(module):
        found: Tensor = module(x)
        return found
    weight: Any = module.weight
    if not torch.is_grad_enabled():
        return times(x, weight)
    return _Linear.apply(x, weight)


def serves(x: Tensor) -> bool:
    """Whether x `[…, K]` has enough tokens, and may be computed on this way."""
    return x.numel() >= _FEW * x.shape[-1] and x.is_contiguous() and untouched(x)


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x `[…, K]` times the transpose of `weight` `[N, K]`."""
    if torch.get_num_threads() == 1 or not _mkldnn.is_available():  # torch's convolution would not use oneDNN
        return x @ weight.t()
    rows = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)  # [1, K, 1, tokens], channels last
    y = F.conv2d(rows, weight[:, :, None, None])
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return d_y @ weight, d_y.flatten(0, -2).t() @ x.flatten(0, -2)
        d_x = times(d_y.contiguous(), weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = d_y.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight


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


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's `forward` and nothing else, on parameters in float32 on a CPU."""
    everywhere = compat.forward_hooks(())  # of all modules
    if everywhere is None or any(everywhere) or not compat.is_unmodified(module):
        return False
    return all(_ordinary(parameter) for parameter in module.parameters(recurse=False))


def is_linear(module: nn.Module) -> bool:
    """Whether a plain module is a linear map without a bias."""
    return type(module) is nn.Linear and module.bias is None and is_plain(module)


def untouched(*given: Tensor) -> bool:
    """Whether operations on these tensors run as written: on a CPU in float32, not traced, without autocast."""
    return not traced(*given) and all(_ordinary(x) for x in given) and not torch.is_autocast_enabled("cpu")


def _ordinary(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"
