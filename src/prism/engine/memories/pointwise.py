"""Pointwise attention: each visible token has its own weight, without a softmax over all of them.

    o_t = (1 / n_t) Σ_j SiLU(q_tᵀ k_j · K^-½ + bias(t - j)) v_j      over the n_t tokens j ≤ t of t's document

The sum is divided by the number of visible tokens, not by a maximum length, so an output depends only on the tokens
before it: streaming equals one pass, at any length. The bias is learned per distance: each of the nearest distances has
its own, farther ones share, with eight per doubling. The state is attention's cache (attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inputs import repeat_heads, zero_padding
from prism.engine.memories.attention import Attend, Cache, advance, append, first_seen, without_padding

NEAR, FAR_PER_DOUBLING = 32, 8
DISTANCES = 128
"""Entries of a bias table: 32 for distances 0 … 31, 96 for twelve doublings, up to 131,071; the last one also beyond."""

_QUERIES = 256
"""Queries per block; each block computes its weights over the slots up to its last query."""


@dataclass(frozen=True, eq=False)
class Pointwise(Attend):
    """`Attend` with pointwise weights; `window` must be None.

    Args:
        bias: `[H, DISTANCES]`, added to the scores by distance; None adds nothing.
    """

    bias: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            raise ValueError(f"window must be None, because pointwise attention sees all tokens, got {self.window}")
        if self.bias is not None and tuple(self.bias.shape) != (self.q.shape[2], DISTANCES):
            raise ValueError(f"bias has shape {list(self.bias.shape)}, expected [H, {DISTANCES}]")

    def weigh(self, scores: Tensor, seen: Tensor) -> Tensor:
        raised = scores if self.bias is None else scores + by_distance(self.bias, 1, scores.shape[-1])[:, 0]
        weights = F.silu(raised).masked_fill(~seen[:, None], 0.0) / seen.sum(-1)[:, None, None]
        return weights.to(scores.dtype)  # a bias is float32, independent of the model's dtype


def distance_entry(distance: Tensor) -> Tensor:
    """Which entry of the bias table a distance ≥ 0 has."""
    doublings = torch.log2(distance.clamp(min=1).double() / NEAR)
    far = NEAR + (doublings * FAR_PER_DOUBLING).floor().long()
    return torch.where(distance < NEAR, distance, far).clamp(max=DISTANCES - 1)


def by_distance(bias: Tensor, queries: int, slots: int) -> Tensor:
    """`[H, DISTANCES]` → `[H, queries, slots]`, for queries whose own slots are the last ones.

    Entries where a slot comes after its query have no meaning.
    """
    slot = torch.arange(slots, device=bias.device)
    own = slot[slots - queries :, None]
    per_distance = bias[:, distance_entry(slot)]  # [H, slots], of distances 0, 1, …
    return per_distance[:, (own - slot).clamp(min=0)]


def parallel(update: Pointwise, state: Cache | None = None) -> tuple[Tensor, Cache]:
    """Blocks of queries, each against all slots up to its last."""
    u, cache = without_padding(update), update.initial(state)
    rows = append(u, cache)
    S = cache["k"].shape[1]
    first = first_seen(u, cache)  # [B, T]
    own = S + torch.arange(u.tokens, device=u.q.device)
    q = u.q.transpose(1, 2) * u.q.shape[-1] ** -0.5
    k, v = (repeat_heads(rows[name], u.q.shape[2]).transpose(1, 2) for name in ("k", "v"))  # [B, H, S + T, …]
    outputs = []
    for start in range(0, u.tokens, _QUERIES):
        end = min(start + _QUERIES, u.tokens)
        slots = S + end
        slot = torch.arange(slots, device=q.device)
        scores = q[:, :, start:end] @ k[:, :, :slots].transpose(-1, -2)
        if update.bias is not None:
            scores = scores + by_distance(update.bias, end - start, slots)
        seen = (slot >= first[:, start:end, None]) & (slot <= own[start:end, None])  # [B, queries, slots]
        weights = F.silu(scores).masked_fill(~seen.unsqueeze(1), 0.0)
        outputs.append(weights.to(v.dtype) @ v[:, :, :slots])
    count = own - first + 1
    o = torch.cat(outputs, 2).transpose(1, 2) / count[..., None, None]
    return zero_padding(o, update.mask), advance(u, rows, cache)
