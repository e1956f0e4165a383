"""Replace MiniMax's lightning attention, a loop over blocks: S_t = e^{-slope} S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prism.engine import Update, memory
from prism.hf.documents import document_numbers, document_starts
from prism.hf.linear_maps import linear


def lightning_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the layer's `forward`. In half precision one cached token stays with the original."""

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        batch, tokens, _ = hidden_states.shape
        exact = hidden_states.dtype == torch.float32 and seq_idx is None and cu_seq_lens_q is None
        state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
        few = tokens == 1 if state is not None else exact and tokens <= self.block_size
        if few and state is not None and (not exact or attention_mask is not None):
            return original(self, hidden_states, position_embeddings, attention_mask, past_key_values)
        mixed = self.act_fn(linear(self.qkv_proj, hidden_states))
        if attention_mask is not None:
            mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
        if few:  # the engine would check and choose for longer than these few operations take
            rows = mixed.view(batch, tokens, self.num_attention_heads, -1).transpose(1, 2)
            q, k, v = rows.split(self.head_dim, -1)
            if state is not None:
                end = (state * torch.exp(-self.slope_rate)).addcmul_(k.mT, v)
                o = q @ end
            else:
                end = (k * self.key_decay[:, -tokens:]).mT @ v
                o = (q @ k.mT * self.diagonal_decay[:, :, :tokens, :tokens]) @ v
            o = o.transpose(1, 2)
        else:
            q, k, v = mixed.view(batch, tokens, self.num_attention_heads, -1).split(self.head_dim, -1)
            # Not the buffer: in half precision it would be rounded.
            decay = -self.get_slope_rate(mixed.device).float().flatten().expand(batch, tokens, -1)
            numbers = document_numbers(batch, tokens, seq_idx, None, cu_seq_lens_q)
            o, end = memory(Update(q, k.unsqueeze(3), v.unsqueeze(3), decay, reset=document_starts(numbers)), state)
            end = end.to(v.dtype)
        o = self.norm(o.reshape(batch, tokens, -1))
        o = linear(self.out_proj, torch.sigmoid(linear(self.output_gate, hidden_states)) * o)
        if past_key_values is not None:
            past_key_values.set_linear_cache(self.layer_idx, end)
        return o, end

    return forward
