"""Run the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 and OLMo-hybrid in segments of tokens on a CPU (delta_segments.py).

Their linear maps are called as they are, so that LoRA, quantisation and hooks keep working. With a cache, packed documents,
adapters, a compiler, half precision or few tokens the layers run as before, with the replaced functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from prism.hf.delta_segments import Layout, Sizes, Weights, gated_delta_layer
from prism.hf.linear_maps import can_stack, is_plain, linear, stacked, untouched

_DOCUMENTS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")
_SMALL = 128
"""Fewer tokens stay with the original: there is little to keep in the cache."""

Forward = Callable[..., Tensor]
Projected = tuple[list[Tensor], Tensor, Tensor, Layout]
"""Outputs of linear maps, b and a `[B, T, H]`, and how to take the outputs apart."""


def qwen3_next(original: Forward) -> Forward:
    """Make the `forward` of a layer whose maps hold queries, keys, values and gates, b and a, group by group."""

    def project(self: Any, x: Tensor) -> Projected:
        groups, r = self.num_k_heads, self.num_v_heads // self.num_k_heads
        widths = [self.head_k_dim, self.head_k_dim, r * self.head_v_dim, r * self.head_v_dim]

        def of_groups(z: Tensor, widths: list[int], dim: int) -> Sequence[Tensor]:
            return z.unflatten(dim, (groups, -1)).split(widths, dim + 1)

        def layout(sources: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
            *parts, gate = of_groups(sources[0], widths, 2)
            return parts, gate

        maps: tuple[Any, Any] = self.in_proj_qkvz, self.in_proj_ba
        if can_stack(x, *maps):  # with rows in another order, the parts of all groups stand side by side
            *qkv, z, b, a = (
                part.flatten(0, 1)
                for each, sizes in zip(maps, (widths, [r, r]), strict=True)
                for part in of_groups(each.weight, sizes, 0)
            )
            rows, gate, ba = stacked(x, qkv, [z], [b, a])
            b, a = ba.chunk(2, -1)
            return [rows, gate], b, a, _whole
        b, a = of_groups(self.in_proj_ba(x), [r, r], 2)
        return [linear(self.in_proj_qkvz, x)], b.flatten(2), a.flatten(2), layout

    return _made(original, project, norm="norm", out="out_proj")


def qwen3_5(original: Forward) -> Forward:
    """Make the `forward` of a layer with one map for queries, keys and values and one for the gates."""
    return _made(original, _projected("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "norm", "out_proj")


def olmo_hybrid(original: Forward) -> Forward:
    """Make the `forward` of a layer with separate maps."""
    return _made(original, _projected("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj")


def _projected(*names: str) -> Callable[[Any, Tensor], Projected]:
    """Maps that hold all heads: those of the convolution's channels, of the gates, of b and of a."""

    def project(self: Any, x: Tensor) -> Projected:
        *channels, gate, b, a = (getattr(self, name) for name in names)
        if can_stack(x, *channels, gate, b, a):
            groups = channels, [gate], [b, a]
            rows, opened, ba = stacked(x, *[[each.weight for each in group] for group in groups])
            b, a = ba.chunk(2, -1)
            return [rows, opened], b, a, _whole
        return [linear(each, x) for each in (*channels, gate)], b(x), a(x), _whole

    return project


def _whole(sources: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
    """A layout of whole tensors, the gate last."""
    *parts, gate = (source.unsqueeze(2) for source in sources)
    return parts, gate


def _made(original: Forward, project: Callable[[Any, Tensor], Projected], norm: str, out: str) -> Forward:
    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        last: Any = getattr(self, norm)
        documents = any(more.get(name) is not None for name in _DOCUMENTS)
        listeners = any(
            callable(each) for each in more.values()
        )  # adapters, who wait for a call of the memory function
        if cache_params is not None or documents or listeners:
            return original(self, hidden_states, cache_params, attention_mask, **more)
        if not _serves(self, hidden_states, last):
            return original(self, hidden_states, cache_params, attention_mask, **more)
        masked = sys.modules[type(self).__module__].apply_mask_to_padding_states
        sources, b, a, layout = project(self, masked(hidden_states, attention_mask))
        beta = b.sigmoid() * 2.0 if getattr(self, "allow_neg_eigval", False) else b.sigmoid()
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        if not bool(g.detach().isfinite().all()):  # after an overflow: delta.py says what becomes of it
            return original(self, hidden_states, cache_params, attention_mask, **more)
        sizes = Sizes(layout, self.num_k_heads, self.head_k_dim, last.variance_epsilon)
        weights = Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, last.weight)
        return linear(getattr(self, out), gated_delta_layer(sizes, sources, weights, g, beta))

    return forward


def _serves(layer: Any, x: Tensor, norm: Any) -> bool:
    """Whether the layer computes what `gated_delta_layer` does, and gains from it."""
    if x.ndim != 3 or x.shape[1] < _SMALL or not untouched(x, layer.A_log, layer.dt_bias):
        return False
    silu = layer.activation in ("silu", "swish") and norm.activation == "silu"
    return silu and is_plain(layer.conv1d) and is_plain(norm)
