"""Compute chunks of a few dozen tokens in matrix products, passing the state from chunk to chunk: the fast form.

Within a segment of up to 512 tokens the affine maps of all chunks are computed at once. Segments run one after the other,
so temporaries stay in cache and memory is linear in T. One decay per head, or none, takes the path with the hand-written
backward (head_chunks.py, in compiled code on the CPU through head_chunks_operator.py). A decay per channel takes the
block equations (block.py) and autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.linear.block import Blocks, affine, from_blocks, to_blocks
from prism.engine.linear.head_chunks import head_chunks
from prism.engine.linear.head_chunks_operator import head_chunks_operator
from prism.engine.linear.steps import Steps, resolve_keeping_first
from prism.engine.update import Update

SEGMENT = 512
"""Rows whose blocks are computed at once where autograd differentiates the block equations."""
HEAD_SEGMENT = 1024
"""At most this many rows at once in the form with a hand-written backward."""


def chunkwise(update: Update, state: Tensor | None = None, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `[B, T, H, V]` and the memory after the last token.

    `chunk` is the number of tokens in a chunk. Work inside a chunk grows with its length; work between chunks, with the
    size of the state.
    """
    steps = resolve_keeping_first(update, groups=not update.erases and not update.per_channel)
    S = steps.initial(state)
    if chunk is None:
        chunk = chunk_length(update.key_dim, update.value_dim)
    size, segment = (max(1, rows // chunk) * chunk for rows in (SEGMENT, HEAD_SEGMENT))
    # The hand-written backward supports neither tangents nor vmap.
    inputs = (*update.tensors, state)
    transformed = compat.have_tangents(*inputs) or compat.transforms_active(*inputs)
    if update.per_channel or transformed:
        o, S = _in_blocks(steps, S, chunk, size)
        return steps.read(o), S
    if steps.erase_key is not None:  # these paths share the first key's columns only where it is the erase key too
        steps = steps.with_erase_columns()
    # An exported program must run where this library is not installed, so export traces the equations.
    if torch.compiler.is_compiling() and not compat.is_exporting() and S.device.type == "cpu":
        o, S = head_chunks_operator(steps, S, chunk, segment)
    else:
        o, S = head_chunks(steps, S, chunk, segment, differentiable=_in_blocks)
    return steps.read(o), S


def chunk_length(key_dim: int, value_dim: int) -> int:
    """Tokens of a chunk if the caller does not say."""
    return 32 if max(key_dim, value_dim) <= 64 else 64


def _in_blocks(steps: Steps, S: Tensor, chunk: int, size: int) -> tuple[Tensor, Tensor]:
    """By the block equations, which autograd can differentiate any number of times."""
    outputs = []
    steps = steps.with_all_heads()
    for segment in _segments(steps, size):
        o, S = _run(to_blocks(segment, min(chunk, segment.rows)), S)
        outputs.append(from_blocks(o, segment.rows))
    return torch.cat(outputs, 1), S


def _run(rows: Blocks, S: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of one segment's chunks, and the state after the last."""
    maps = affine(rows)
    incoming, S = maps.chain(S)
    return maps.F @ incoming + maps.E, S


def _segments(steps: Steps, size: int) -> Iterator[Steps]:
    """The steps of each segment. `split` has one backward for all; slices would fill a full-size zero tensor each."""
    names = ("q", "k", "w", "log_decay", "erase_key", "erase_write", "erase_strength", "reset")
    present = [name for name in names if getattr(steps, name) is not None]
    for parts in zip(*[getattr(steps, name).split(size, 1) for name in present], strict=True):
        yield replace(steps, **dict(zip(present, parts, strict=True)))
