"""Replace transformers' gated delta rule: Qwen3-Next, Qwen3.5 (dense and MoE) and OLMo-hybrid.

    S_t = (I - β_t k_t k_tᵀ) e^{g_t} S_{t-1} + β_t k_t v_tᵀ        o_t = S_tᵀ q_t K^-½        q, k of length 1

The engine computes it; one cached token on the CPU has a separate form, because there a few small operations cost more
than the arithmetic. In half precision on a GPU queries, keys and values stay in half precision, as in flash-linear-attention,
and the norm that follows the memory is one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prism.engine import Update, layer_ops, memory
from prism.engine.inputs import InvalidValueError
from prism.engine.layer_ops import UNIT_EPS
from prism.hf import norms
from prism.hf.documents import document_numbers, document_starts

Result = tuple[Tensor, Tensor | None]


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    **unused: Any,
) -> Result:
    """Run T tokens through the gated delta rule.

    Args:
        query, key: `[B, T, G, K]`; G divides H.
        value: `[B, T, H, V]`.
        g: log-decay `[B, T, H]`, ≤ 0.
        beta: `[B, T, H]`.
        chunk_size: not used; the engine chooses its own.
        initial_state: `[B, H, K, V]`.
        output_final_state: also return the state after the last token; otherwise None is returned for it.
        use_qk_l2norm_in_kernel: divide queries and keys by their length.
        seq_idx, cu_seqlens: packed documents (documents.py).
        scale: of the queries; None: K^-½.

    Returns:
        The outputs `[B, T, H, V]` in the dtype of `query`, and the state.
    """
    batch, tokens = query.shape[:2]
    half = _half_on_gpu(query)
    q, k = (_half_rows if half else _rows)(query, key, use_qk_l2norm_in_kernel, scale)
    strength = beta.float()
    w = value * beta.to(value.dtype).unsqueeze(-1) if half else norms.scaled_rows(value.float(), strength)
    reset = document_starts(document_numbers(batch, tokens, seq_idx, cu_seqlens))
    update = decayed(
        q, k.unsqueeze(3), w.unsqueeze(3), g.float(), erase_strength=strength, erase_first=True, reset=reset
    )
    o, state = memory(update, initial_state)
    return o.to(query.dtype), state if output_final_state else None


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    **unused: Any,
) -> Result:
    """Same arguments and results as `chunk_gated_delta_rule`, for a few tokens after a cached state."""
    step = query.shape[1] == 1 and initial_state is not None and query.shape[2] == value.shape[2]
    if not step or query.is_cuda:
        return chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            scale=scale,
        )
    assert initial_state is not None
    q, k, v = (x.float().transpose(1, 2) for x in (query, key, value))  # [B, H, 1, …]
    size_q, size_k = key.shape[-1] ** -0.5 if scale is None else scale, None
    if use_qk_l2norm_in_kernel:  # applied to results, which are fewer numbers
        both = torch.cat([q, k], 2)
        lengths = both.square_().sum(-1, keepdim=True).add_(UNIT_EPS).rsqrt_()  # [B, H, 2, 1]
        size_q, size_k = lengths[:, :, :1] * size_q, lengths[:, :, 1:]
    kept = initial_state.float() * g.float().exp().transpose(1, 2).unsqueeze(-1)
    seen, strength = k @ kept, beta.float().transpose(1, 2).unsqueeze(-1)
    error = v - seen if size_k is None else torch.addcmul(v, seen, size_k, value=-1)  # [B, H, 1, V]
    error = error * (strength if size_k is None else strength * size_k)
    state = torch.addcmul(kept, k.mT, error)
    o = (q @ state * size_q).transpose(1, 2).to(query.dtype)
    return o, state if output_final_state else None


def decayed(q: Tensor, k: Tensor, w: Tensor, log_decay: Tensor, **more: Any) -> Update:
    """An update whose log-decay may hold NaN or -inf, as after an overflow in half precision: NaN then spreads.

    A loss scaler relies on that: it skips the step. The engine itself refuses such values.
    """
    try:
        return Update(q, k, w, log_decay, **more)
    except InvalidValueError:
        poison = torch.where(log_decay.isnan(), log_decay, 0.0)
        finite = log_decay.nan_to_num(nan=0.0, neginf=-1e4).clamp(max=0.0)
        return Update(q, k, w + poison[..., None, None], finite, **more)


def gated_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the `forward` of the norm behind the memory, RMSNorm(o) ⊙ silu(gate): one kernel on a GPU, few passes on a CPU."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        given, eps = (hidden_states, gate, self.weight), self.variance_epsilon
        if self.activation == "silu" and layer_ops.gated_norm_serves(*given):
            return layer_ops.gated_norm(*given, eps)
        if self.activation == "silu" and norms.serves(*given):
            return norms.gated_norm(*given, eps, gate_first=False)
        return original(self, hidden_states, gate)

    return forward


def _half_on_gpu(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and layer_ops.use_kernel(x)


def _half_rows(query: Tensor, key: Tensor, normalise: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """`_rows` in the dtype of the queries."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not normalise:
        return query * scale, key
    return layer_ops.l2_normalize(query, scale=scale), layer_ops.l2_normalize(key)


def _rows(query: Tensor, key: Tensor, normalise: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Queries and keys in float32, of length 1 if asked for, the queries times `scale`."""
    q, k = query.float(), key.float()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not normalise:
        return q * scale, k
    return norms.unit_rows(q, scale), norms.unit_rows(k, 1.0)
