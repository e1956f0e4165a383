"""The chunk form for one decay per head (or none), with a hand-written backward: the fast path on the CPU.

Autograd through the block equations would keep every C×C matrix of the sequence. This keeps the incoming state of each chunk
and, with an erase, T⁻¹, F and Y_1, about four numbers per channel and token, and recomputes the rest. Without an erase see
group_chunks.py. With one (erase_chunks.py), symbols are those of block.py. Join the erase with the writes, and the two kinds
of rows, Z = [Q; B]. Where the erase runs along the first key, b = β k_1, it shares that key's columns, otherwise it has
separate ones:

    X = [K_1; …; K_L],  Y = [W_1 - R; W_2; …; W_L]      or      X = [A; K_1; …; K_L],  Y = [-R; W_1; …; W_L]
    N = (Q Xᵀ) ⊙ Γ,  M = (B Xᵀ) ⊙ Γ,  T = I + M_1        R = (B ⊙ e^G) S + M Y
    O = (Q ⊙ e^G) S + N Y                                S' = e^{G_C} S + (X ⊙ e^{G_C - G})ᵀ Y

(M_1: the first C columns.) With Y° the writes without the erase and M° the columns of M after the first C, solved for R:

    Y_1 = T⁻¹(Y°_1 - M° Y°) - F S,                        F = T⁻¹(B ⊙ e^G)

Backward, from dO and dS'. Because Y has R in its first part, the erase needs no separate terms:

    dY = Nᵀ dO + (X ⊙ e^{G_C - G}) dS'                   dU = -T⁻ᵀ dY_1           dS = e^{G_C} dS' + (Q ⊙ e^G)ᵀ dO - Fᵀ dY_1
    dN = dO Yᵀ,  dM = dU Yᵀ                              dW_1 = -dU if the columns are shared, otherwise dW = dY + M°ᵀ dU
    dZ = ([dN; dM] ⊙ Γ) X + e^G ⊙ ([dO; dU] Sᵀ)          dX = ([dN; dM] ⊙ Γ)ᵀ Z + e^{G_C - G} ⊙ (Y dS'ᵀ)

and G receives, from every weight exp(G_i - G_j), +(dΓ Γ)_ij at i and the same with a minus at j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.autocast import without_autocast
from prism.engine.linear import erase_chunks, group_chunks
from prism.engine.linear.chunk_segment import Kind, erases
from prism.engine.linear.steps import Steps

Kept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]
"""What a segment keeps with an erase (erase_chunks.py); without one only its incoming states."""

Differentiable = Callable[[Steps, Tensor, int, int], tuple[Tensor, Tensor]]

FIELDS = ("q", "k", "w", "log_decay", "erase_write", "erase_key", "erase_strength")


def head_chunks(
    steps: Steps, S: Tensor, chunk: int, segment: int, differentiable: Differentiable
) -> tuple[Tensor, Tensor]:
    """The outputs `[B, R, H, V]` and the memory after the last row.

    `differentiable` computes the same, slower; it is used where the gradient itself is differentiated.
    """
    kind = Kind(chunk, segment, not steps.erase_decayed, not steps.read_after)
    fields = tuple(getattr(steps, name) for name in FIELDS)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*fields, S)):
        if compat.is_exporting():  # a graph of torch.export has no autograd functions
            return differentiable(steps, S, chunk, segment)
        empty: dict[str, Any] = dict.fromkeys((*FIELDS, "reset"))  # autograd keeps the tensors
        o, S = _HeadChunks.apply(*fields, steps.reset, S, kind, replace(steps, **empty), differentiable)
    else:
        o, S, _ = forward(fields, steps.reset, S, kind, keep=False)
    return o, S


class _HeadChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *fields, reset, S, kind, bare, differentiable = arguments
        o, end, kept = forward(tuple(fields), reset, S, kind, keep=True)
        ctx.kind, ctx.bare, ctx.differentiable = kind, bare, differentiable
        ctx.save_for_backward(*fields, reset, S, *[x for each in kept for x in each])
        return o, end

    @staticmethod
    def backward(ctx: Any, dO: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under gradient checkpointing every read recomputes the segment
        inputs = len(FIELDS) + 2
        (*fields, reset, S), flat = saved[:inputs], saved[inputs:]
        # Autocast is on here if `backward()` was called inside an autocast block.
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself will be differentiated
            steps = replace(ctx.bare, reset=reset)
            form = ctx.differentiable
            return (*without_autocast(_differentiably, form, steps, fields, S, dO, dS, ctx.kind), None, None, None)
        kept = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        return (*without_autocast(backward, tuple(fields), reset, kept, dO, dS, ctx.kind), None, None, None)


def _differentiably(
    form: Differentiable, bare: Steps, fields: Any, S: Any, dO: Tensor, dS: Tensor, kind: Kind
) -> tuple[Tensor | None, ...]:
    """The gradients of the fields, of the reset (none) and of S, themselves differentiable."""
    # As views: one field may depend on another (an erase key on k), whose gradient must not include the first's.
    *fields, S = (None if x is None else x.view_as(x) for x in (*fields, S))
    results = form(replace(bare, **dict(zip(FIELDS, fields, strict=True))), S, kind.chunk, kind.segment)
    wanted = [x for x in (*fields, S) if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, (dO, dS), create_graph=True, allow_unused=True))
    *gradients, d_S = [next(found) if x is not None and x.requires_grad else None for x in (*fields, S)]
    return (*gradients, None, d_S)


def forward(
    fields: tuple, reset: Tensor | None, S: Tensor, kind: Kind, keep: bool
) -> tuple[Tensor, Tensor, list[Kept]]:
    """The outputs, the memory after the last row, and with `keep` each segment's `Kept` for `backward`."""
    if erases(fields):
        o, S, kept = erase_chunks.forward(fields, reset, S, kind, keep)
        return o, S, [*kept]
    o, S, incoming = group_chunks.forward(fields, reset, S, kind, keep)
    return o, S, [(None, None, None, each) for each in incoming]


def backward(
    fields: tuple, reset: Tensor | None, kept: list[Kept], dO: Tensor, dS: Tensor, kind: Kind
) -> tuple[Tensor | None, ...]:
    """The gradients of the fields, of the reset (none) and of the incoming memory."""
    if erases(fields):
        return erase_chunks.backward(fields, reset, kept, dO, dS, kind)
    incoming = [each[-1] for each in kept]
    d_q, d_k, d_w, d_g, d_S = group_chunks.backward(fields, reset, incoming, dO, dS, kind)
    return d_q, d_k, d_w, d_g, None, None, None, None, d_S
