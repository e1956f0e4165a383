"""Replace transformers' causal depthwise convolution, computed over tokens as they lie in memory.

    y_t = act(c + Σ_i weight[W-1-i] x_{t-i}), per channel

transformers transposes to channels first, which `conv1d` pays for with copies, most of all backward. Here the same
transposed views are read as images of one row, T pixels and D channels, channels last: oneDNN convolves these in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import layer_ops
from prism.engine.compat import have_tangents
from prism.engine.memory import without_autocast
from prism.hf.documents import document_numbers

_SILU = ("silu", "swish")
_CACHED = 2**19
"""Numbers of a span in the backward pass. Measured: a third faster than over all tokens at once."""


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
        given = _wide(x), _wide(weight), None if bias is None else _wide(bias), silu
        y = _Convolution.apply(*given) if torch.is_grad_enabled() else _convolve(*given)
    else:
        x = x if x.is_cuda else _wide(x)
        y = layer_ops.short_conv(x, weight.t(), bias, documents=numbers, activation=silu)
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


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The sum of taps of x `[B, T, D]`, then SiLU if asked for; weight `[D, W]`."""
    y = taps_over(x, weight, bias)[:, : x.shape[1]]
    return F.silu(y, inplace=True) if silu else y


def taps_over(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[B, T + W - 1, D]`: taps over x with zeros on both sides."""
    image = _tokens_first(x).unsqueeze(1).permute(0, 3, 1, 2)  # [B, D, 1, T], channels last
    taps, padding = weight[:, None, None], (0, weight.shape[1] - 1)
    y: Tensor = without_autocast(F.conv2d, image, taps, bias, 1, padding, 1, len(weight))
    return y.squeeze(2).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """x `[B, T, D]` with the channels of a token side by side in memory."""
    if x.stride(2) == 1 or x.shape[2] == 1:
        return x.contiguous()
    rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    for target, source in zip(rows, x, strict=True):  # torch transposes a matrix in blocks, a batch number by number
        target.copy_(source)
    return rows


class _Convolution(torch.autograd.Function):
    """`_convolve`, with a backward of two more convolutions and one pass over the tokens for each tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias)
        return _convolve(x, weight, bias, silu)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            inputs = [z for z in (x, weight, bias) if z is not None and z.requires_grad]
            again = layer_ops.short_conv(x, weight.t(), bias, activation=ctx.silu)
            found = iter(torch.autograd.grad(again, inputs, d_out, create_graph=True))
            return (*[next(found) if z is not None and z.requires_grad else None for z in (x, weight, bias)], None)
        return (*_backward(x, weight, bias, ctx.silu, _tokens_first(d_out)), None)


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, the weight and the bias, over spans of tokens so short that they stay in the cache."""
    (B, T, D), W = x.shape, weight.shape[1]
    d_x, d_weight = torch.empty_like(d_out), torch.zeros_like(weight)
    d_bias = None if bias is None else torch.zeros_like(bias)
    span = max(W, _CACHED // (B * D))
    after = x.new_zeros(B, W - 1, D)
    for start in reversed(range(0, T, span)):
        stop, seen = min(start + span, T), max(0, start - W + 1)
        rows, before = x[:, seen:stop], None
        if silu:
            before = taps_over(rows, weight, bias)[:, start - seen : stop - seen]
        d_x[:, start:stop], after = span_back(rows, weight, before, d_out[:, start:stop], after, d_weight, d_bias)
    return d_x, d_weight, d_bias


def span_back(
    rows: Tensor,
    weight: Tensor,
    before: Tensor | None,
    d_out: Tensor,
    after: Tensor,
    d_weight: Tensor,
    d_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Add a span's part to the gradients of weight and bias; return the gradient of its tokens, and the next `after`.

    Args:
        rows: the n tokens of the span behind up to W - 1 earlier ones, `[B, ≤ W - 1 + n, D]`.
        weight: `[D, W]`.
        before: the sum of taps, `[B, n, D]`, if SiLU follows it.
        d_out: the gradient of the outputs, `[B, n, D]`.
        after: the gradient of the sum of taps of the W - 1 tokens after the span, zeros after the last.
        d_weight, d_bias: added to, in place.
    """
    (B, n, D), W = d_out.shape, weight.shape[1]
    wide = d_out.new_empty(B, n + W - 1, D)
    d_y, wide[:, n:] = wide[:, :n], after
    if before is None:
        d_y.copy_(d_out)
    else:
        torch.ops.aten.silu_backward.grad_input(d_out, before, grad_input=d_y)
    past, products = (
        rows.shape[1] - n,
        torch.empty_like(d_out),
    )  # one for all taps: a fresh tensor costs more than a sum
    for back in range(min(W, past + n)):
        first = max(0, back - past)  # a product and a sum: einsum would copy channel by channel
        here = torch.mul(d_y[:, first:], rows[:, past + first - back : past + n - back], out=products[:, first:])
        d_weight[:, -1 - back] += here.sum((0, 1))
    if d_bias is not None:
        d_bias += d_y.sum((0, 1))
    # The gradient of a token comes from the tokens after it: the same convolution backwards.
    return taps_over(wide, weight.flip(1))[:, W - 1 : W - 1 + n], wide[:, : W - 1].clone()
