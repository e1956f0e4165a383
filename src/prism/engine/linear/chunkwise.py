"""Chunks of a few dozen tokens in matrix products, the state handed on from chunk to chunk: linear in T, the fast form.

Within a segment of 512 tokens all chunks find their affine maps at once; segments follow one another, so that the
temporaries stay in cache and memory stays linear in T. One decay per head, or none, takes the path with the written-out
backward (head_chunks.py, in compiled code on the CPU through head_chunks_operator.py); a decay per channel goes through
the block equations and autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.linear.block import Rows, affine, blocks, unblocks
from prism.engine.linear.head_chunks import head_chunks
from prism.engine.linear.head_chunks_operator import head_chunks_operator
from prism.engine.linear.steps import Steps, resolve
from prism.engine.update import Update

SEGMENT = 512


def chunkwise(update: Update, state: Tensor | None = None, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """`chunk`: tokens in a chunk. What a chunk does inside grows with its length, what it hands on with the state."""
    steps = resolve(update)
    S = steps.initial(state)
    if chunk is None:
        chunk = 32 if max(update.key_dim, update.value_dim) <= 64 else 64
    size = max(1, SEGMENT // chunk) * chunk
    # What is written out has neither tangents nor a batch of its own to be mapped over.
    inputs = (*update.tensors, state)
    transformed = compat.have_tangents(*inputs) or compat.transforms_active(*inputs)
    if update.per_channel or transformed:
        o, S = _in_blocks(steps, S, chunk, size)
    elif torch.compiler.is_compiling() and not compat.is_exporting() and S.device.type == "cpu":
        # Not for export: an exported program must run where this library is not installed, so export traces the equations.
        o, S = head_chunks_operator(steps, S, chunk, size)
    else:
        o, S = head_chunks(steps, S, chunk, size, again=_in_blocks)
    return steps.read(o), S


def _in_blocks(steps: Steps, S: Tensor, chunk: int, size: int) -> tuple[Tensor, Tensor]:
    """By the block equations, which autograd can differentiate as often as it likes."""
    outputs = []
    for segment in _segments(steps, size):
        o, S = _run(blocks(segment, min(chunk, segment.rows)), S)
        outputs.append(unblocks(o, segment.rows))
    return torch.cat(outputs, 1), S


def _run(rows: Rows, S: Tensor) -> tuple[Tensor, Tensor]:
    maps = affine(rows)
    incoming = []
    for n in range(maps.D.shape[2]):
        incoming.append(S)
        S = maps.advance(n, S)
    return maps.F @ torch.stack(incoming, 2) + maps.E, S


def _segments(steps: Steps, size: int) -> Iterator[Steps]:
    """`split` has one backward for all segments; slices would fill a full-size zero tensor each."""
    names = ("q", "k", "w", "log_decay", "erase_key", "erase_write", "reset")
    present = [name for name in names if getattr(steps, name) is not None]
    for pieces in zip(*[getattr(steps, name).split(size, 1) for name in present], strict=True):
        yield replace(steps, **dict(zip(present, pieces, strict=True)))
