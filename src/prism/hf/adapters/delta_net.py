"""`AdaptedDeltaNet`: a Gated DeltaNet layer of transformers with adapters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import memory
from prism.engine.layer_ops import l2_normalize
from prism.hf.adapters import compat, slots
from prism.hf.adapters.branch import ANCHOR, Branch, First, Sizes
from prism.hf.adapters.layer import AdapterLayer
from prism.rules.rule import Span

CLASSES = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
}
"""Model type of transformers → the class of its Gated DeltaNet layers."""


def sizes_of_delta_net(module: nn.Module) -> Sizes | None:
    """The sizes of a Gated DeltaNet layer of transformers; None for anything else."""
    place, _, family = type(module).__module__.rpartition(".modeling_")
    if place != f"transformers.models.{family}" or type(module).__name__ != CLASSES.get(family):
        return None
    compat.check(module)
    layer: Any = module
    return Sizes(layer.hidden_size, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)


class AdaptedDeltaNet(AdapterLayer):
    """Takes the place of the layer in its decoder layer."""

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        active, cache = self.active_branches(), None
        if cache_params is not None:
            cache = cache_params.layers[self.base_layer.layer_idx]
            slots.keep_only(cache, list(active))
        given = {
            "hidden_states": hidden_states,
            "cache_params": cache_params,
            "attention_mask": attention_mask,
            **kwargs,
        }
        if not active:
            return self.base_layer(**given)
        compat.listen(self.base_layer)
        x = hidden_states
        if attention_mask is not None:
            # As in the base layer, padding is an input of zeros. On the left that leaves an empty memory empty.
            x = x * attention_mask[:, :, None].to(x.dtype)
        visit = Visit(active, x, cache)
        y = self.base_layer(**given, **{compat.PASSED_ON: visit})
        if not visit.served:
            raise RuntimeError(
                f"the memory of {type(self.base_layer).__name__} was not computed by a function of its module, so that the "
                "adapter could not add its writes: load the model without kernels from the hub (use_kernels=False)"
            )
        return y


class Visit:
    """Adds the branches' outputs to the base layer's, once, inside its forward pass.

    Args:
        branches: the active branches, by name.
        x: the layer's input `[B, T, width]`, zero where it is padding.
        cache: the layer's part of the cache; None without one.
    """

    def __init__(self, branches: dict[str, Branch], x: Tensor, cache: Any) -> None:
        self.branches, self.x, self.cache = branches, x, cache
        self.served = False

    def __call__(
        self,
        o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """o `[B, T, H, V]` and the outputs of all branches. The other arguments are those of the memory function."""
        if use_qk_l2norm_in_kernel:
            q, k = l2_normalize(q), l2_normalize(k)
        first = First(q * q.shape[-1] ** -0.5, k, v, beta.to(v.dtype), g)
        span = Span(reset=document_starts(self.x, cu_seqlens, seq_idx))
        for name, branch in self.branches.items():
            before, window = (None, None) if self.cache is None else slots.read(self.cache, name)
            update, carry = branch.update(self.x, first, {} if window is None else {ANCHOR: window}, span)
            added, after = memory(update, before)
            if self.cache is not None:
                slots.write(self.cache, name, after, carry[ANCHOR])
            o = o + added.to(o.dtype)
        self.served = True
        return o


def document_starts(x: Tensor, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None) -> Tensor | None:
    """`[B, T]` or `[1, T]` bool for x `[B, T, width]`: where packed documents start; None if nothing is packed.

    Args:
        cu_seqlens: cumulative lengths of the documents in one row.
        seq_idx: each token's document number `[B, T]`, which `prism.accelerate` makes from `position_ids`; of a prompt with
            more tokens, the last ones count.
    """
    B, T = x.shape[:2]
    if seq_idx is not None:
        numbers = seq_idx.expand(B, -1)[:, -T:]
        return F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0))
    return None if cu_seqlens is None else torch.isin(torch.arange(T, device=x.device), cu_seqlens).unsqueeze(0)
