"""Replace transformers' Mamba-2 scan: Mamba-2, Bamba, Falcon-H1, Granite, Nemotron-H and Zamba-2.

    S_t = e^{A Δ_t} S_{t-1} + B_t (Δ_t x_t)ᵀ        y_t = S_tᵀ C_t + D x_t        Δ = softplus(dt + bias), per head

Their state is `[B, H, P, N]`, the transpose of the engine's. Their scan repeats B and C to all heads and holds C × C × H
products of all chunks at once; the engine keeps groups and a few chunks in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine import memory
from prism.hf import norms
from prism.hf.delta import decayed
from prism.hf.documents import document_numbers, document_starts


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run T tokens through the Mamba-2 memory.

    Args:
        hidden_states: x, `[B, T, H, P]`.
        dt: `[B, T, H]`.
        A: `[H]`, negative.
        B, C: `[B, T, G, N]`; G divides H.
        chunk_size: not used; the engine chooses its own.
        D: `[H]` or `[H, P]`.
        dt_bias: `[H]`.
        initial_states: `[B, H, P, N]`.
        dt_softplus: apply softplus to dt.
        dt_limit: the smallest and largest step.
        return_final_states: also return the state after the last token.
        z: a gate `[B, T, H, P]`.
        seq_idx, cu_seqlens, cu_seq_lens_q: packed documents (documents.py).

    Returns:
        `[B, T, H, P]` in float32, and the state if asked for.
    """
    step = _step_sizes(dt, dt_bias, dt_softplus).clamp(min=dt_limit[0], max=dt_limit[1])
    x = hidden_states.float()
    numbers = document_numbers(x.shape[0], x.shape[1], seq_idx, cu_seqlens, cu_seq_lens_q)
    update = decayed(
        C.float(),
        B.float().unsqueeze(3),
        norms.scaled_rows(x, step).unsqueeze(3),
        A.float() * step,
        reset=document_starts(numbers),
    )
    y, state = memory(update, None if initial_states is None else initial_states.mT)
    y = y if D is None else norms.add_scaled(y, x, D)
    y = y if z is None else y * F.silu(z.float())
    return (y, state.mT.contiguous()) if return_final_states else y


def selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """Run one token; the state `[B, H, P, N]` is overwritten.

    Args:
        state: `[B, H, P, N]`.
        hidden_states: x, `[B, H, P]`.
        dt: `[B, H, P]`.
        A: `[H, P, N]`.
        B, C: `[B, G, N]`; G divides H.
        D, dt_bias: `[H, P]`.
        z: a gate `[B, H, P]`.
    """
    heads = hidden_states.shape[1]
    one_decay = _one_value(A, 2) and _one_value(dt, 1) and (dt_bias is None or _one_value(dt_bias, 1))
    if one_decay:  # the same for all channels of a head: one exponential per head instead of one per number
        A, dt, dt_bias = A[:, :1, :1], dt[..., :1], None if dt_bias is None else dt_bias[:, :1]
    step = _step_sizes(dt, dt_bias, dt_softplus)  # [B, H, P or 1]
    x = hidden_states.float()
    repeat = heads // B.shape[1]
    B, C = (part.float().repeat_interleave(repeat, 1).unsqueeze(-2) for part in (B, C))  # [B, H, 1, N]
    new = torch.addcmul(state * (step.unsqueeze(-1) * A.float()).exp(), (x * step).unsqueeze(-1), B)
    state.copy_(new)
    y = _skip((new @ C.mT).squeeze(-1), x, D)
    y = y if z is None else y * F.silu(z.float())
    return y.to(hidden_states.dtype)


def gated_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the `forward` of the norm behind the memory, RMSNorm(y ⊙ silu(gate)) by groups of channels: few passes on a CPU."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or not norms.serves(hidden_states, gate, self.weight):
            return original(self, hidden_states, gate)
        weight = self.weight.view(-1, getattr(self, "group_size", len(self.weight)))
        return norms.gated_norm(hidden_states, gate, weight, self.variance_epsilon, gate_first=True)

    return forward


def no_fused_layer(*unused: Any, **ignored: Any) -> None:
    """Answer the request for a whole layer in one kernel with None: the layer then calls its parts, which are replaced."""
    return None


def _step_sizes(dt: Tensor, dt_bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    return F.softplus(dt) if softplus else dt


def _skip(y: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    if D is None:
        return y
    return torch.addcmul(y, x, D.unsqueeze(-1) if D.ndim == 1 else D)


def _one_value(x: Tensor, dimensions: int) -> bool:
    """Whether the last dimensions were made by `expand`: all their entries are one number."""
    last = zip(x.shape[-dimensions:], x.stride()[-dimensions:], strict=True)
    return all(size == 1 or stride == 0 for size, stride in last)
