"""Replace RecurrentGemma's recurrence, a loop over tokens: h_t = a_t h_{t-1} + x_t per channel, and its convolution.

On the CPU the loop is the fastest form: one operation per token. transformers' costs more because autograd records each
assignment to a slice, and its backward then fills a whole tensor per token. Here forward and backward are two loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import memory
from prism.engine.memories.diagonal import Diagonal
from prism.hf.conv import causal_conv1d_fn
from prism.hf.linear_maps import untouched

_SMALLEST = 1e-30


def scan(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method that runs the recurrence. One token stays with the original."""

    @functools.wraps(original)
    def rnn_scan(
        self: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        if hidden_states.shape[1] == 1:
            return original(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype)
        x, a = hidden_states.to(acc_dtype), recurrent_gate.to(acc_dtype)
        if x.is_cuda or torch.compiler.is_compiling():
            fresh = reset.squeeze(-1).expand(x.shape[:2])
            h, last = memory(Diagonal(x, log_decay=a.clamp_min(_SMALLEST).log(), reset=fresh), recurrent_states)
            return h.to(hidden_states.dtype), last
        start = torch.zeros_like(x[:, 0]) if recurrent_states is None else recurrent_states.to(x)
        h = _Loop.apply(x, a * ~reset, start)
        return h.to(hidden_states.dtype), h[:, -1]

    return rnn_scan


def unit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `forward` of gates and recurrence: one cached token in fewer operations, the rest as in the original."""

    @functools.wraps(original)
    def forward(self: Any, activations: Tensor, position_ids: Tensor) -> Tensor:
        state, (batch, tokens, width) = self.recurrent_states, activations.shape
        one = tokens == 1 and state is not None and not torch.is_grad_enabled()
        if not one or not untouched(activations, state, self.recurrent_param) or 0 in position_ids:
            return original(self, activations, position_ids)
        x = activations.reshape(batch, self.num_attention_heads, -1).transpose(0, 1)
        opened, gate = (
            torch.baddbmm(bias.unsqueeze(1), x, weight).sigmoid_().transpose(0, 1).reshape(batch, 1, width)
            for bias, weight in (
                (self.input_gate_bias, self.input_gate_weight),
                (self.recurrent_gate_bias, self.recurrent_gate_weight),
            )
        )
        log_a = gate.mul_(F.softplus(self.recurrent_param).mul_(-8.0))
        share = (log_a * 2).exp_().neg_().add_(1).sqrt_()  # of the token, sqrt(1 - a²)
        h = opened.mul_(activations).mul_(share).addcmul_(log_a.exp_(), state.unsqueeze(1))
        self.recurrent_states = h[:, -1]
        return h

    return forward


def recurrent_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the `forward` of the block around the recurrence. One token stays with the original."""

    @functools.wraps(original)
    def forward(
        self: Any,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        use_cache: bool = True,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        if position_ids.shape[1] == 1 or input_states.shape[1] == 1:
            return original(self, input_states, position_ids, attention_mask, use_cache)
        gate = self.act_fn(self.linear_y(input_states))
        x = self.linear_x(input_states).transpose(1, 2)
        if use_cache:
            if self.conv1d_state is None or self.conv1d_state.shape[0] != len(x):
                self._setup_cache(len(x), x.device, x.dtype)
            self.conv1d_state = F.pad(x, (self.conv1d_width - 1 - x.shape[-1], 0))
        else:
            self.conv1d_state = self.rg_lru.recurrent_states = None
        weight, bias = self.conv_1d.weight.squeeze(1), self.conv_1d.bias
        x = causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, cu_seq_lens_q=cu_seq_lens_q)
        return self.linear_out(self.rg_lru(x.transpose(1, 2), position_ids) * gate), None

    return forward


class _Loop(torch.autograd.Function):
    """The states `[B, T, D]` of h_t = a_t h_{t-1} + x_t, from h_0 `[B, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, start: Tensor) -> Tensor:
        states = torch.empty_like(x.transpose(0, 1), memory_format=torch.contiguous_format)  # tokens first
        h = start
        for x_t, a_t, now in zip(x.unbind(1), a.unbind(1), states.unbind(0), strict=True):
            h = torch.addcmul(x_t, a_t, h, out=now)
        states = states.transpose(0, 1)
        ctx.save_for_backward(x, a, start, states)
        return states

    @staticmethod
    def backward(ctx: Any, d_states: Tensor) -> tuple[Tensor, ...]:
        x, a, start, states = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            h, again = start, []
            for x_t, a_t in zip(x.unbind(1), a.unbind(1), strict=True):
                h = torch.addcmul(x_t, a_t, h)
                again.append(h)
            return torch.autograd.grad(torch.stack(again, 1), (x, a, start), d_states, create_graph=True)
        d_x = torch.empty_like(x.transpose(0, 1), memory_format=torch.contiguous_format)
        d_h = torch.zeros_like(start)
        for d_t, a_t, now in zip(*[reversed(z) for z in (d_states.unbind(1), a.unbind(1), d_x.unbind(0))], strict=True):
            torch.add(d_t, d_h, out=now)
            d_h = now * a_t
        d_x = d_x.transpose(0, 1)
        before = torch.cat([start.unsqueeze(1), states[:, :-1]], 1)
        return d_x, d_x * before, d_h
