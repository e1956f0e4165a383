"""Serve an `Update` with the kernels: which updates they serve, and the inputs they read.

Triton is imported only when a kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.kernels import available
from prism.engine.kernels.available import device_refuses, tile_widths
from prism.engine.kernels.channel_serve import by_channel, run_channels
from prism.engine.linear.recurrent import recurrent
from prism.engine.linear.steps import at_substep
from prism.engine.padding import real_resets, repeat_heads, repeat_mask, zero_padding
from prism.engine.update import Update, wants_gradients

WIDEST_KEY, WIDEST_VALUE, MOST_WRITES = 256, 512, 4


def on_gpu(u: Update) -> bool:
    """Whether the update is on a GPU, where `backend="auto"` tries the kernels. Warns once if the versions rule them out."""
    available.warn_if_unavailable(u.w)
    return u.w.is_cuda


def step_refuses(u: Update) -> str | None:
    """Why the decode kernel cannot serve an update, in one clause; None if it can."""
    if (problem := _both_refuse(u)) is not None:
        return problem
    if u.per_channel:
        return "has no decay per key channel"
    if u.read != "after":
        return f"has no read={u.read!r}"
    if u.erases and u.erase_on != "decayed":
        return f"has no erase_on={u.erase_on!r}"
    if u.writes > MOST_WRITES and wants_gradients(*u.tensors):  # which the chunk kernels compute
        return f"serves up to {MOST_WRITES} writes per token where gradients are wanted, not {u.writes}"
    return None


def chunks_refuse(u: Update) -> str | None:
    """Why the chunk kernels cannot serve an update, in one clause; None if they can."""
    if u.writes > MOST_WRITES and not by_channel(u):
        return f"serves up to {MOST_WRITES} writes per token, not {u.writes}"
    return _both_refuse(u)


def _both_refuse(u: Update) -> str | None:
    """Why neither the chunk kernels nor the decode kernel can serve an update, in one clause."""
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
    from prism.engine.kernels import memory

    K, V, n = u.key_dim, u.value_dim, u.substeps
    columns = _kernel_inputs(u)
    keys, values = tile_widths(K, V, u.w.is_cuda)
    given = None if state is None else _pad(state.float(), keys - K, values - V)
    o, final, *_ = memory.memory(*columns, given, wants_gradients(*columns, given))
    return o[:, n - 1 :: n, :, :V], final[..., :K, :V]


def run_step(u: Update, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the decode kernel: the outputs `[B, T, H, V]` and the final state `[B, H, K, V]`.

    The decode kernel has no gradient: where one is wanted, the chunk kernels compute the update.
    """
    if wants_gradients(*u.tensors, state):
        # `step_refuses` does not see the state. If only the state wants a gradient and there are too many writes for the chunk
        # kernels, the recurrence in torch computes it.
        return run_chunks(u, state) if chunks_refuse(u) is None else recurrent(u, state)
    from prism.engine.kernels import decode

    given = None if state is None else state.float()
    return decode.step(*u.tensors, u.reset, u.mask, given, u.substeps)


def _kernel_inputs(u: Update) -> tuple[Any, ...]:
    """The fields of `launch.KernelInputs`: masked tokens set to zero, heads repeated, widths padded."""
    n, H, dtype = u.substeps, u.heads, u.w.dtype
    per_row = repeat_mask(u.mask, n)

    def converted(z: Tensor | None, mask: Tensor | None, dtype: torch.dtype = dtype) -> Any:
        return None if z is None else repeat_heads(zero_padding(z.to(dtype), mask), H)

    q, g = converted(u.q, u.mask), converted(u.log_decay, u.mask, torch.float32)
    x, w, b = converted(u.k, per_row), converted(u.w, per_row), None
    strength = converted(u.erase_strength, per_row, torch.float32)
    if u.erase_write_first:
        b = converted(u.erase_key, per_row)
    elif u.erases and not _erases_first(u):  # the erase gets a separate column, which writes nothing else
        b = converted(u.erase_key, per_row)
        a = b if u.erase_write is None else converted(u.erase_write, per_row)
        x = torch.cat([a.unsqueeze(3), x], 3)
        w = torch.cat([torch.zeros_like(w[..., :1, :]), w], 3)
        if u.erase_write is None:
            b = None
    reset = real_resets(u.reset, u.mask)
    documents = None if reset is None else at_substep(reset, n, 0).cumsum(1, dtype=torch.int32)
    keys, values = tile_widths(u.key_dim, u.value_dim, u.w.is_cuda)
    keys, values = keys - u.key_dim, values - u.value_dim
    return (
        _pad(at_substep(q, n, n - 1), keys),
        _pad(x, keys),
        _pad(w, values),
        None if g is None else at_substep(g, n, 0),
        None if b is None else _pad(b, keys),
        strength,
        documents,
    )


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
