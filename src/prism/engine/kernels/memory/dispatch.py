"""Serve an `Update` with the kernels: which updates they serve, and the inputs they read.

Triton is imported only when a kernel runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inputs import real_resets, repeat_heads, repeat_mask, zero_padding
from prism.engine.kernels import available
from prism.engine.kernels.available import device_refuses, tile_widths
from prism.engine.kernels.memory.channel_dispatch import by_channel, run_channels
from prism.engine.update import Update, wants_gradients

WIDEST_KEY, WIDEST_VALUE = 256, 512


def on_gpu(u: Update) -> bool:
    """Whether the update is on a GPU, where `backend="auto"` tries the kernels. Warns once if the versions rule them out."""
    available.warn_if_unavailable(u.w)
    return u.w.is_cuda


def refuses(u: Update) -> str | None:
    """Why the kernels cannot serve an update, in one clause; None if they can. It is the same for all of them."""
    if (problem := device_refuses(u.w)) is not None:
        return problem
    if not u.w.is_cuda and u.w.dtype == torch.bfloat16:
        return "has no bfloat16 on a CPU: Triton's interpreter multiplies matrices of it wrongly"
    if u.state_dtype == torch.float64:
        return "has no float64"
    if u.key_dim > WIDEST_KEY or u.value_dim > WIDEST_VALUE:
        return f"serves keys up to {WIDEST_KEY} and values up to {WIDEST_VALUE} wide, not {u.key_dim} and {u.value_dim}"
    return None


def run_chunks(u: Update, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the chunk kernels: the outputs `[B, T, H, V]` and the final state `[B, H, K, V]`."""
    if by_channel(u):
        return run_channels(u, state, _erases_first(u))
    from prism.engine.kernels.memory import operator as memory

    K, V = u.key_dim, u.value_dim
    columns = _kernel_inputs(u)
    keys, values = tile_widths(K, V, u.w.is_cuda)
    given = None if state is None else _pad(state.float(), keys - K, values - V)
    o, final, *_ = memory.memory(*columns, given, wants_gradients(*columns, given))
    return o[..., :V], final[..., :K, :V]


def run_step(u: Update, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the decode kernel: the outputs `[B, T, H, V]` and the final state `[B, H, K, V]`.

    The decode kernel has no gradient: where one is wanted, the chunk kernels compute the update.
    """
    if wants_gradients(*u.tensors, state):
        return run_chunks(u, state)
    from prism.engine.kernels.token import decode

    given = None if state is None else state.float()
    return decode.step(*u.tensors, u.reset, u.mask, given, *decode_options(u))


def decode_options(u: Update) -> tuple[int, bool, bool]:
    """The fields of `decode.Options`."""
    return u.substeps, u.erase_on == "undecayed", u.read == "before"


def _kernel_inputs(u: Update) -> tuple[Any, ...]:
    """The fields of `launch.KernelInputs`: masked tokens set to zero, one number of groups, widths padded."""
    dtype, per_row = u.w.dtype, repeat_mask(u.mask, u.substeps)

    def converted(z: Tensor | None, mask: Tensor | None, dtype: torch.dtype = dtype) -> Any:
        return None if z is None else zero_padding(z if z.dtype == dtype else z.to(dtype), mask)

    apart = u.erases and not _erases_first(u)  # the erase gets a separate column, which writes nothing else
    shared = (u.q, u.k, *((u.erase_key, u.erase_write) if apart else ()))
    groups = math.lcm(*[int(z.shape[2]) for z in shared if z is not None])
    q, x = repeat_heads(converted(u.q, u.mask), groups), repeat_heads(converted(u.k, per_row), groups)
    w, g, b = converted(u.w, per_row), converted(u.log_decay, u.mask, torch.float32), None
    strength = converted(u.erase_strength, per_row, torch.float32)
    if u.erase_write_first:
        b = repeat_heads(converted(u.erase_key, per_row), groups)
    elif apart:
        b = repeat_heads(converted(u.erase_key, per_row), groups)
        a = b if u.erase_write is None else repeat_heads(converted(u.erase_write, per_row), groups)
        x = torch.cat([a.unsqueeze(3), x], 3)
        w = torch.cat([torch.zeros_like(w[..., :1, :]), w], 3)
        if u.erase_write is None:
            b = None
    reset = real_resets(u.reset, u.mask)
    documents = None if reset is None else reset.cumsum(1, dtype=torch.int32)
    keys, values = tile_widths(u.key_dim, u.value_dim, u.w.is_cuda)
    keys, values = keys - u.key_dim, values - u.value_dim
    return _pad(q, keys), _pad(x, keys), _pad(w, values), g, None if b is None else _pad(b, keys), strength, documents


def _erases_first(u: Update) -> bool:
    """Whether the erase is known to go along the first key written: declared, or the two share memory.

    Where a gradient is wanted, shared memory is not enough: a view may be detached, have hooks, or need a separate gradient.
    """
    if u.erase_first:
        return True
    b = u.erase_key
    if b is None or u.erase_write is not None or torch.compiler.is_compiling():
        return False
    if wants_gradients(b, u.k):
        return False
    first = u.k[..., 0, :]
    return b.data_ptr() == first.data_ptr() and b.stride() == first.stride() and b.shape == first.shape


def _pad(z: Tensor, columns: int, values: int | None = None) -> Tensor:
    """Append `columns` zeros to the last dimension; with `values`, that many there and `columns` to the one before it."""
    padding = (0, columns) if values is None else (0, values, 0, columns)
    return F.pad(z, padding) if any(padding) else z
