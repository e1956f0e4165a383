"""Wrap the chunk form of head_chunks.py in one torch operator, for compiled code on the CPU.

Traced, forward and backward of one layer are several hundred small operations for every 512 tokens, and inductor spends
minutes on them without making them faster. As one operator they cost the compiler nothing, and other lengths need no
recompilation. Eager code does not use it: eager code supports second derivatives, compiled code does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.engine.autocast import without_autocast
from prism.engine.linear.chunk_segment import Kind, segment_rows
from prism.engine.linear.head_chunks import FIELDS, Kept, backward, forward
from prism.engine.linear.steps import Steps


def head_chunks_operator(steps: Steps, S: Tensor, chunk: int, segment: int) -> tuple[Tensor, Tensor]:
    """Same results as `head_chunks`: the outputs `[B, R, H, V]` and the memory after the last row."""
    inputs = (*(getattr(steps, name) for name in FIELDS), steps.reset, S)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    kind = Kind(chunk, segment, not steps.erase_decayed, not steps.read_after)
    o, end, *_ = _operator(*inputs, *kind, save)
    return o, end


@torch.library.custom_op("prism::head_chunks", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor | None,
    erase_write: Tensor | None,
    erase_key: Tensor | None,
    erase_strength: Tensor | None,
    reset: Tensor | None,
    state: Tensor,
    chunk: int,
    segment: int,
    look_before: bool,
    read_before: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and for the backward `Kept` of all segments, concatenated (empty if not needed)."""
    kind = Kind(chunk, segment, look_before, read_before)
    fields = (q, k, w, log_decay, erase_write, erase_key, erase_strength)
    o, end, kept = without_autocast(forward, fields, reset, state, kind, save)
    E, F, first, incoming = (_joined([each[i] for each in kept], w) for i in range(4))
    return o, end, E, F, first, incoming


@_operator.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    q, _, w, _, erase_write, _, erase_strength, *_, chunk, _, _, _, save = inputs
    B, rows, G, K = q.shape
    H, V = w.shape[2], w.shape[-1]
    C = min(chunk, rows)
    m = (rows + C - 1) // C * B * G

    def kept(needed: bool, *shape: int) -> Tensor:
        return w.new_empty(shape) if save and needed else w.new_empty(0)

    erases = erase_write is not None or erase_strength is not None
    return (
        w.new_empty(B, rows, H, V),
        w.new_empty(B, H, K, V),
        kept(erases, m, C, C),
        kept(erases, m, C, K),
        kept(erases, m, C, V),
        kept(True, m, K, V) if erases else kept(True, m, K, H // G, V),
    )


@torch.library.custom_op("prism::head_chunks_backward", mutates_args=())
def _backward_operator(
    d_o: Tensor,
    d_end: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    log_decay: Tensor | None,
    erase_write: Tensor | None,
    erase_key: Tensor | None,
    erase_strength: Tensor | None,
    reset: Tensor | None,
    E: Tensor,
    F: Tensor,
    first: Tensor,
    incoming: Tensor,
    chunk: int,
    segment: int,
    look_before: bool,
    read_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the fields, q to erase_strength (empty where there is none), and of the state."""
    B, rows, G, _ = q.shape
    fields = (q, k, w, log_decay, erase_write, erase_key, erase_strength)
    kind = Kind(chunk, segment, look_before, read_before)
    size = segment_rows(fields, kind) // min(chunk, rows) * B * G  # chunks in a segment
    erases = erase_write is not None or erase_strength is not None
    kept: list[Kept] = []
    for start in range(0, incoming.shape[0], size):
        part = slice(start, start + size)
        erase = (E[part], F[part], first[part]) if erases else (None, None, None)
        kept.append((*erase, incoming[part]))
    *gradients, _, d_state = without_autocast(backward, fields, reset, kept, d_o, d_end, kind)
    given = [w.new_empty(0) if x is None else x.contiguous() for x in gradients]
    d_q, d_k, d_w, d_log_decay, d_erase_write, d_erase_key, d_erase_strength = given
    return d_q, d_k, d_w, d_log_decay, d_erase_write, d_erase_key, d_erase_strength, d_state.contiguous()


@_backward_operator.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    _, d_end, *fields = inputs[: 2 + len(FIELDS)]
    w = fields[2]
    return (*(w.new_empty(0) if x is None else x.new_empty(x.shape) for x in fields), d_end.new_empty(d_end.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, chunk, segment, look_before, read_before, save = inputs
    ctx.kind, ctx.save = (chunk, segment, look_before, read_before), save
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, d_o: Tensor, d_end: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.save:
        raise RuntimeError("prism::head_chunks was called with save=False: nothing was kept for a backward pass")
    tensors = ctx.saved_tensors
    *gradients, d_state = _backward_operator(d_o, d_end, *tensors, *ctx.kind)
    present = [None if x is None else g for x, g in zip(tensors[: len(FIELDS)], gradients, strict=True)]
    return (*present, None, d_state, *[None] * 5)


_operator.register_autograd(_differentiate, setup_context=_keep)


def _joined(parts: list[Tensor | None], like: Tensor) -> Tensor:
    """The segments' tensors, concatenated; empty if there are none."""
    present = [x for x in parts if x is not None]
    return torch.cat(present) if present else like.new_empty(0)
