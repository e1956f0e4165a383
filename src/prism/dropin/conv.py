"""Replace transformers' causal depthwise convolution, computed over tokens as they lie in memory.

    y_t = act(c + Σ_i weight[W-1-i] x_{t-i}), per channel

transformers transposes to channels first, which `conv1d` pays for with copies, most of all backward. Here the same
transposed views are read as `[B, T, D]`, and each tap is one multiplication and addition over all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.dropin.documents import document_numbers
from prism.engine import fused
from prism.engine.compat import have_tangents

_SILU = ("silu", "swish")
_CACHED = 2**17
"""Numbers of a span. Measured: backward a quarter faster than over all tokens at once."""


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Convolve `[B, D, T]` over the last W tokens.

    Args:
        hidden_states: `[B, D, T]`.
        weight: `[D, W]`, the current token's tap last.
        bias: `[D]`.
        activation: a name of transformers' activations; None: none.
        seq_idx, cu_seqlens, cu_seq_lens_q: packed documents; taps do not reach into an earlier one.
    """
    x = hidden_states.transpose(1, 2)
    numbers = document_numbers(x.shape[0], x.shape[1], seq_idx, cu_seqlens, cu_seq_lens_q)
    silu = activation in _SILU
    if numbers is None and not x.is_cuda and not torch.compiler.is_compiling() and not have_tangents(x):
        y = _Taps.apply(_wide(x), _wide(weight), None if bias is None else _wide(bias), silu)
    else:
        x = x if x.is_cuda else _wide(x)
        y = fused.short_conv(x, weight.t(), bias, documents=numbers, activation=silu)
    if activation is not None and not silu:
        y = _activation(activation)(y)
    return y.to(hidden_states.dtype).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **unused: Any,
) -> Tensor:
    """Convolve new tokens `[B, D, T]` after the cached ones `[B, D, S]`, which are moved on in place."""
    taps = weight.shape[-1]
    seen = torch.cat([conv_state.to(weight.dtype), hidden_states.to(weight.dtype)], -1)
    tokens, length = hidden_states.shape[-1], conv_state.shape[-1]
    conv_state.copy_(seen[..., -length:])
    if tokens == 1:
        y = (_wide(seen[..., -taps:]) * weight).sum(-1, keepdim=True)
        y = y if bias is None else y + bias.unsqueeze(-1)
    else:
        y = F.conv1d(seen, weight.unsqueeze(1), bias, groups=seen.shape[1])[..., -tokens:]
    y = y if activation is None else F.silu(y) if activation in _SILU else _activation(activation)(y)
    return y.to(hidden_states.dtype)


def _wide(x: Tensor) -> Tensor:
    """In float32 if in half precision: a sum of taps rounded one after the other would be less exact than `conv1d`."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def _spans(x: Tensor) -> list[tuple[int, int]]:
    """Spans of tokens of `[B, T, D]`, so short that the tensors of one stay in the cache."""
    size = max(1, _CACHED // (x.shape[0] * x.shape[2]))
    return [(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size)]


class _Taps(torch.autograd.Function):
    """The sum of taps of x `[B, T, D]`, then SiLU if asked for; weight `[D, W]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        y, taps = torch.empty_like(x, memory_format=torch.contiguous_format), weight.t()
        out = torch.empty_like(y) if silu else y
        for start, stop in _spans(x):
            torch.mul(x[:, start:stop], taps[-1], out=y[:, start:stop])
            for back in range(1, len(taps)):
                first = max(start, back)
                if first < stop:
                    y[:, first:stop].addcmul_(x[:, first - back : stop - back], taps[-1 - back])
            if bias is not None:
                y[:, start:stop] += bias
            if silu:
                torch.ops.aten.silu.out(y[:, start:stop], out=out[:, start:stop])
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, y if silu else None)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, weight, bias) if z is not None and z.requires_grad]
            again = fused.short_conv(x, weight.t(), bias, activation=ctx.silu)
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            return (*[next(found) if z is not None and z.requires_grad else None for z in (x, weight, bias)], None)
        taps, T = weight.t(), x.shape[1]
        d_y, d_x, d_taps = torch.empty_like(y) if ctx.silu else d_out, torch.empty_like(x), torch.zeros_like(taps)
        for start, stop in reversed(_spans(x)):  # a token's gradient comes from the tokens after it
            if ctx.silu:
                torch.ops.aten.silu_backward.grad_input(
                    d_out[:, start:stop], y[:, start:stop], grad_input=d_y[:, start:stop]
                )
            torch.mul(d_y[:, start:stop], taps[-1], out=d_x[:, start:stop])
            for back in range(len(taps)):
                last, first = min(stop, T - back), max(start, back)
                if back and start < last:
                    d_x[:, start:last].addcmul_(d_y[:, start + back : last + back], taps[-1 - back])
                if first < stop:  # a product and a sum: einsum would copy channel by channel
                    d_taps[-1 - back] += (d_y[:, first:stop] * x[:, first - back : stop - back]).sum((0, 1))
        return d_x, d_taps.t(), None if bias is None else d_y.sum((0, 1)), None
