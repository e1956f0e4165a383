"""Compute chunks of a few dozen tokens in matrix products, passing the state from chunk to chunk: the fast form.

One decay per head, or none, takes chunks.py, whose backward is written by hand. A decay per channel takes the block equations
(block.py) and autograd; so do second derivatives, tangents, `vmap` and exported programs. Either way segments of a sequence run
one after the other, so that temporaries stay in cache and memory is linear in T.

Compiled code on the CPU calls chunks.py as one operator. Traced, forward and backward of one layer are several hundred small
operations for every segment, and inductor spends minutes on them without making them faster. As one operator they cost the
compiler nothing, and other lengths need no recompilation. Eager code does not use it: it supports second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.inputs import without_autocast
from prism.engine.linear.block import affine, from_blocks, to_blocks
from prism.engine.linear.chunks import Fields, Kept, Kind, backward, forward, segment_rows
from prism.engine.update import Steps, Update, steps_keeping_first

BLOCK_ROWS = 512
"""Rows whose blocks are computed at once where autograd differentiates the block equations."""
MOST_ROWS = 1024
"""At most this many rows at once in chunks.py."""


def chunkwise(update: Update, state: Tensor | None = None, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `[B, T, H, V]` and the memory after the last token.

    `chunk` is the number of tokens in a chunk. Work inside a chunk grows with its length; work between chunks, with the
    size of the state.
    """
    steps = steps_keeping_first(update, groups=not update.erases and not update.per_channel)
    S = steps.initial(state)
    if chunk is None:
        chunk = chunk_length(update.key_dim, update.value_dim)
    # The hand-written backward supports neither tangents nor vmap.
    inputs = (*update.tensors, state)
    if update.per_channel or compat.have_tangents(*inputs) or compat.transforms_active(*inputs):
        o, S = in_blocks(steps, S, chunk)
    else:
        o, S = in_chunks(steps, S, chunk)
    return steps.read(o), S


def chunk_length(key_dim: int, value_dim: int) -> int:
    """Tokens of a chunk if the caller does not say."""
    return 32 if max(key_dim, value_dim) <= 64 else 64


def in_blocks(steps: Steps, S: Tensor, chunk: int, most_rows: int = BLOCK_ROWS) -> tuple[Tensor, Tensor]:
    """By the block equations, which autograd can differentiate any number of times: `[B, R, H, V]` and the last memory."""
    outputs = []
    for segment in _segments(steps.with_all_heads(), max(1, most_rows // chunk) * chunk):
        maps = affine(to_blocks(segment, min(chunk, segment.rows)))
        incoming, S = maps.chain(S)
        outputs.append(from_blocks(maps.F @ incoming + maps.E, segment.rows))
    return torch.cat(outputs, 1), S


def _segments(steps: Steps, size: int) -> Iterator[Steps]:
    """The steps of each segment. `split` has one backward for all; slices would fill a full-size zero tensor each."""
    present = [name for name in Fields._fields if getattr(steps, name) is not None]
    for parts in zip(*[getattr(steps, name).split(size, 1) for name in present], strict=True):
        yield replace(steps, **dict(zip(present, parts, strict=True)))


def in_chunks(steps: Steps, S: Tensor, chunk: int, most_rows: int = MOST_ROWS) -> tuple[Tensor, Tensor]:
    """As `in_blocks`, by chunks.py: for one decay per head, or none."""
    if steps.erase_key is not None:  # chunks share the first key's columns only where it is the erase key too
        steps = steps.with_erase_columns()
    kind = Kind(chunk, max(1, most_rows // chunk) * chunk, not steps.erase_decayed, not steps.read_after)
    x = Fields(*(getattr(steps, name) for name in Fields._fields))
    differentiated = torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in (*x, S))
    exporting = compat.is_exporting()
    if torch.compiler.is_compiling() and not exporting and S.device.type == "cpu":
        o, S, *_ = _operator(*x, S, *kind, differentiated)
    elif differentiated and exporting:  # the program must run where this library is not installed
        o, S = in_blocks(steps, S, chunk, most_rows)
    elif differentiated:
        o, S = _InChunks.apply(*x, S, kind)
    else:
        o, S, _ = forward(x, S, kind, keep=False)
    return o, S


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *fields, S, ctx.kind = arguments
        o, end, kept = forward(Fields(*fields), S, ctx.kind, keep=True)
        ctx.save_for_backward(*fields, S, *[z for each in kept for z in each])
        return o, end

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under gradient checkpointing every read recomputes the segment
        inputs = len(Fields._fields) + 1
        (*fields, S), flat = saved[:inputs], saved[inputs:]
        # Autocast is on here if `backward()` was called inside an autocast block.
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            return (*without_autocast(_differentiably, fields, S, d_o, dS, ctx.kind), None)
        kept = [Kept(*flat[i : i + len(Kept._fields)]) for i in range(0, len(flat), len(Kept._fields))]
        d, d_S = without_autocast(backward, Fields(*fields), kept, d_o, dS, ctx.kind)
        return (*d, d_S, None)


def _differentiably(fields: list[Tensor | None], S: Tensor, d_o: Tensor, dS: Tensor, kind: Kind) -> list[Tensor | None]:
    """The gradients of the fields and of S, themselves differentiable."""
    # As views: one field may depend on another (an erase key on k), whose gradient must not include the first's.
    given: list[Any] = [None if z is None else z.view_as(z) for z in (*fields, S)]
    *viewed, S = given
    results = in_blocks(_steps(Fields(*viewed), kind), S, kind.chunk, kind.segment)
    wanted = [z for z in given if z is not None and z.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, (d_o, dS), create_graph=True, allow_unused=True))
    return [next(found) if z is not None and z.requires_grad else None for z in given]


def _steps(x: Fields, kind: Kind) -> Steps:
    return Steps(
        **x._asdict(),
        erase_decayed=not kind.look_before,
        read_after=not kind.read_before,
        substeps=1,
        out_dtype=x.w.dtype,
    )


@torch.library.custom_op("prism::chunkwise", mutates_args=())
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
    x = Fields(q, k, w, log_decay, erase_write, erase_key, erase_strength, reset)
    o, end, kept = without_autocast(forward, x, state, kind, save)
    columns = zip(*kept, strict=True) if kept else [()] * len(Kept._fields)
    incoming, T, F, first = (torch.cat(z) if z and z[0] is not None else w.new_empty(0) for z in columns)
    return o, end, incoming, T, F, first


@_operator.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    x, chunk, save = Fields(*inputs[: len(Fields._fields)]), inputs[-5], inputs[-1]
    (B, rows, G, K), (H, _, V) = x.q.shape, x.w.shape[2:]
    C = min(chunk, rows)
    n = (rows + C - 1) // C * B * G

    def kept(*shape: int, needed: bool = x.erases) -> Tensor:
        return x.w.new_empty(shape if save and needed else 0)

    o, end = x.w.new_empty(B, rows, H, V), x.w.new_empty(B, H, K, V)
    return o, end, kept(n, K, H // G * V, needed=True), kept(n, C, C), kept(n, C, K), kept(n, C, V)


@torch.library.custom_op("prism::chunkwise_backward", mutates_args=())
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
    incoming: Tensor,
    T: Tensor,
    F: Tensor,
    first: Tensor,
    chunk: int,
    segment: int,
    look_before: bool,
    read_before: bool,
) -> list[Tensor]:
    """The gradients of the fields q to erase_strength (empty where there is none) and of the state."""
    x = Fields(q, k, w, log_decay, erase_write, erase_key, erase_strength, reset)
    kind = Kind(chunk, segment, look_before, read_before)
    B, rows, G, _ = q.shape
    size = segment_rows(x, kind) // min(chunk, rows) * B * G  # chunks in a segment
    parts = [z.split(size) if z.numel() else [None] * -(-len(incoming) // size) for z in (incoming, T, F, first)]
    kept = [Kept(*each) for each in zip(*parts, strict=True)]
    d, d_state = without_autocast(backward, x, kept, d_o, d_end, kind)
    return [w.new_empty(0) if z is None else z.contiguous() for z in (*d[:-1], d_state)]


@_backward_operator.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, d_end, *fields = inputs[: 2 + len(Fields._fields) - 1]
    w = fields[2]
    return [w.new_empty(0) if z is None else z.new_empty(z.shape) for z in (*fields, d_end)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings, ctx.save = inputs[-5:-1], inputs[-1]
    ctx.save_for_backward(*inputs[: len(Fields._fields)], *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _differentiate(ctx: Any, d_o: Tensor, d_end: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.save:
        raise RuntimeError("prism::chunkwise was called with save=False: nothing was kept for a backward pass")
    saved = ctx.saved_tensors
    *found, d_state = _backward_operator(d_o, d_end, *saved, *ctx.settings)
    fields = [None if z is None else d for z, d in zip(saved, found, strict=False)]
    return (*fields, None, d_state, *[None] * 5)


_operator.register_autograd(_differentiate, setup_context=_keep)
