"""Serve an `Update` with the kernels of a decay per key channel.

They also serve what the kernels of a decay per head do not: reading before a token's writes, and erasing the undecayed state.
A decay per head, or none, is then given to every channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inputs import real_resets, repeat_heads, repeat_mask, zero_padding
from prism.engine.kernels.available import tile_width
from prism.engine.update import Update, at_substep, wants_gradients


def by_channel(u: Update) -> bool:
    """Whether the channel kernels compute an update, and not those of a decay per head."""
    return u.per_channel or u.read == "before" or (u.erases and u.erase_on == "undecayed")


def run_channels(u: Update, state: Tensor | None, along_first: bool) -> tuple[Tensor, Tensor]:
    """Run the channel kernels: the outputs `[B, T, H, V]` and the final state `[B, H, K, V]`. `along_first`: the erase goes
    along the first key written."""
    from prism.engine.kernels.memory.channel_launch import BEFORE, UNDECAYED
    from prism.engine.kernels.memory.channel_operator import channel_memory

    K, V, n, before = u.key_dim, u.value_dim, u.substeps, u.read == "before"
    inputs = _inputs(u, along_first)
    keys, values = _tile_widths(K, V, u.w.is_cuda)
    given = None if state is None else _pad(state.float(), 0, values - V, 0, keys - K)
    reads = before * BEFORE + (u.erases and u.erase_on == "undecayed") * UNDECAYED
    o, final, *_ = channel_memory(*inputs, given, reads, wants_gradients(*inputs, given))
    return o[:, 0 if before else n - 1 :: n, :, :V], final[..., :K, :V]


def _inputs(u: Update, along_first: bool) -> tuple[Any, ...]:
    """The fields of `channel_launch.ChannelInputs`: masked tokens set to zero, widths padded; heads repeated only if q, k and
    the erase have different numbers of them. Sub-steps become tokens."""
    n, H, before = u.substeps, u.heads, u.read == "before"
    per_row = repeat_mask(u.mask, n)
    counts = {z.shape[2] for z in (u.q, u.k, u.erase_key, u.erase_write) if z is not None}
    G = counts.pop() if len(counts) == 1 else H

    def converted(z: Tensor | None, mask: Tensor | None, heads: int = G, dtype: torch.dtype = u.w.dtype) -> Any:
        return None if z is None else repeat_heads(zero_padding(z.to(dtype), mask), heads)

    q, x, w = converted(u.q, u.mask), converted(u.k, per_row), converted(u.w, per_row, H)
    g = converted(u.log_decay, u.mask, H, torch.float32)
    if g is None:
        g = q.new_zeros(u.batch, u.tokens, H, dtype=torch.float32)
    if not u.per_channel:
        g = g.unsqueeze(-1).expand(*g.shape, u.key_dim)
    b, strength = converted(u.erase_key, per_row), converted(u.erase_strength, per_row, H, torch.float32)
    if u.erases and not along_first and not u.erase_write_first:
        # The erase gets a separate column, which writes nothing else.
        a = b if u.erase_write is None else converted(u.erase_write, per_row)
        x = torch.cat([a.unsqueeze(3), x], 3)
        w = torch.cat([torch.zeros_like(w[..., :1, :]), w], 3)
    if u.erase_write is None:  # what it looks up is then the key of column 0
        b = None
    reset = real_resets(u.reset, u.mask)
    documents = None if reset is None else at_substep(reset, n, 0).cumsum(1, dtype=torch.int32)
    keys, values = _tile_widths(u.key_dim, u.value_dim, u.w.is_cuda)
    keys, values = keys - u.key_dim, values - u.value_dim
    return (
        _pad(at_substep(q, n, 0 if before else n - 1), 0, keys),
        _pad(x, 0, keys),
        _pad(w, 0, values),
        _pad(at_substep(g, n, 0), 0, keys),
        None if b is None else _pad(b, 0, keys),
        strength,
        documents,
    )


def _tile_widths(key_dim: int, value_dim: int, on_gpu: bool) -> tuple[int, int]:
    """K and V as padded for the channel kernels. On a GPU, only sizes checked on one: both 32, or both at least 64."""
    K, V = tile_width(key_dim), tile_width(value_dim)
    least = 16 if not on_gpu else 32 if max(K, V) <= 32 else 64
    return max(K, least), max(V, least)


def _pad(z: Tensor, *padding: int) -> Tensor:
    """`F.pad` with zeros, which copies even where there is nothing to append."""
    return F.pad(z, padding) if any(padding) else z
