"""The chunk form for one decay per head (or none), with a hand-written backward: the fast path on the CPU.

Autograd through the block equations would keep every C×C matrix of the sequence. This keeps T⁻¹, its product with the erase
keys, the erase's part of Y and the incoming state of each chunk, about four numbers per channel and token, and recomputes
the rest. Symbols are those of block.py. Join the erase with the writes, and the two kinds of rows, Z = [Q; B]. Where the
erase runs along the first key, b = β k_1, it shares that key's columns, otherwise it has separate ones:

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
from prism.engine.linear.chunk_chain import chain, chain_back
from prism.engine.linear.chunk_rows import copy_from_chunks, copy_to_chunks
from prism.engine.linear.chunk_segment import (
    Kind,
    Segment,
    as_grid,
    gram,
    inverse,
    scaled,
    segment_at,
    segment_rows,
    weighted,
    writes_at,
)
from prism.engine.linear.steps import Steps

Kept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]
"""A segment's T⁻¹ `[m, C, C]`, F `[m, C, K]`, Y_1 `[m, C, V]` (None without an erase) and incoming states `[m, K, V]`."""

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
    values = fields[2]
    B, rows, H, _, V = values.shape
    o = values.new_empty(B, rows, H, V)
    kept: list[Kept] = []
    segment = segment_rows(fields, kind)
    for start in range(0, rows, segment):
        length = min(segment, rows - start)
        s, y = segment_at(fields, reset, start, length, kind), writes_at(fields, start, length, kind)
        C = s.chunk
        z_start, x_end, MN = scaled(s.z, s.start), scaled(s.x, s.end), gram(s)
        E = F = None
        if s.erases:
            E = inverse(s, MN)
            F = E @ z_start[:, C:]
            first = y[:, :C] if y.shape[1] == C else y[:, :C].baddbmm_(MN[:, C:, C:], y[:, C:], alpha=-1)
            y[:, :C] = E @ first
        incoming, S = chain(F, s.carry, x_end, y, S)
        part = z_start[:, :C] @ incoming
        copy_from_chunks(o, part.baddbmm_(MN[:, :C], y), start, length)
        if keep:
            kept.append((E, F, y[:, :C].contiguous() if s.erases else None, incoming))
    return o, S, kept


def backward(
    fields: tuple, reset: Tensor | None, kept: list[Kept], dO: Tensor, dS: Tensor, kind: Kind
) -> tuple[Tensor | None, ...]:
    """The gradients of the fields, of the reset (none) and of the incoming memory."""
    rows, L = fields[0].shape[1], fields[2].shape[-2]
    d_q, d_k, d_w, d_g, d_a, d_b, d_beta = (None if x is None else torch.empty_like(x) for x in fields)
    assert d_q is not None and d_k is not None and d_w is not None
    segment = segment_rows(fields, kind)
    for index in reversed(range(len(kept))):
        start = index * segment
        length = min(segment, rows - start)
        s = segment_at(fields, reset, start, length, kind)
        E, F, first, incoming = kept[index]
        C = s.chunk
        y = _all_writes(fields, first, start, length, kind)
        z_start, x_end, MN = scaled(s.z, s.start), scaled(s.x, s.end), gram(s)
        d_rows = s.z.new_empty(*s.z.shape[:2], incoming.shape[-1])  # [dO; dU]
        d_o = d_rows[:, :C]
        copy_to_chunks(d_o, dO, start, length)

        d_y = MN[:, :C].mT @ d_o
        outgoing, dS = chain_back(F, s.carry, z_start[:, :C], x_end, d_o, d_y, dS)
        if E is not None:
            d_y[:, :C] = E.mT @ d_y[:, :C]
            d_u = torch.neg(d_y[:, :C], out=d_rows[:, C:])
            if y.shape[1] > C:
                d_y[:, C:].baddbmm_(MN[:, C:, C:].mT, d_u)
        copy_from_chunks(d_w, d_y[:, -L * C :], start, length)

        d_MN = d_rows @ y.mT
        d_z, d_x = d_rows @ incoming.mT, y @ outgoing.mT
        d_z.unflatten(1, (-1, C)).mul_(s.start)
        d_x.unflatten(1, (-1, C)).mul_(s.end)
        if d_g is not None:
            pairs = _pairs(MN.mul_(d_MN), s, kind)
            d_decay = _decay_gradient(
                pairs, (s.z * d_z).sum(-1), (s.x * d_x).sum(-1), outgoing, incoming, s.carry, kind
            )
            copy_from_chunks(d_g, d_decay, start, length)
        weighted(d_MN, s)
        d_z.baddbmm_(d_MN, s.x)
        d_x.baddbmm_(d_MN.mT, s.z)
        if s.strength is not None and d_beta is not None:  # b = β k_1
            copy_from_chunks(d_beta, (d_z[:, C:] * s.x[:, :C]).sum(-1), start, length)
            d_x[:, :C].addcmul_(s.strength, d_z[:, C:])
        copy_from_chunks(d_q, d_z[:, :C], start, length)
        copy_from_chunks(d_k, d_x[:, -L * C :], start, length)
        if d_a is not None and d_b is not None:
            copy_from_chunks(d_a, d_x[:, :C], start, length)
            copy_from_chunks(d_b, d_z[:, C:], start, length)
    return d_q, d_k, d_w, d_g, d_a, d_b, d_beta, None, dS


def _all_writes(fields: tuple, first: Tensor | None, start: int, length: int, kind: Kind) -> Tensor:
    """Y `[m, J·C, V]`, of which the first C columns were kept if there is an erase."""
    if first is not None and fields[4] is None and fields[2].shape[-2] == 1:
        return first
    y = writes_at(fields, start, length, kind)
    if first is not None:
        y[:, : first.shape[1]] = first
    return y


def _pairs(product: Tensor, s: Segment, kind: Kind) -> Tensor:
    """dΓ ⊙ Γ `[m, z, C, J, C]`.

    A weight on the diagonal is exp(0). It is left out: its two halves would cancel only up to rounding, which is larger
    than the gradient of a strong decay.
    """
    pairs = as_grid(product, s)
    if not kind.read_before:
        pairs[:, 0].diagonal(dim1=1, dim2=3).zero_()
    return pairs


def _decay_gradient(
    pairs: Tensor, from_state: Tensor, into_state: Tensor, outgoing: Tensor, incoming: Tensor, carry: Tensor, kind: Kind
) -> Tensor:
    """dg `[m, C]`: dG_i, plus as a row and minus as a column, summed over the tokens at and after each one."""
    C = pairs.shape[-1]
    at_rows = pairs.sum((-2, -1)) + from_state.unflatten(-1, (-1, C))  # [m, z, C]
    into = into_state.unflatten(-1, (-1, C)).sum(-2)  # [m, C]
    into[:, -1] = 0  # again exp(0)
    d_G = -(pairs.sum((-4, -3, -2)) + into).double()
    d_G[:, -1] += into.sum(-1) + carry.flatten() * torch.linalg.vecdot(outgoing.flatten(1), incoming.flatten(1))
    for row, uses_previous in zip(at_rows.double().unbind(-2), (kind.read_before, kind.look_before), strict=False):
        if uses_previous:  # G_{i-1}; the first row's is the constant 0
            d_G[:, :-1] += row[:, 1:]
        else:
            d_G += row
    return d_G.flip(-1).cumsum(-1).flip(-1)
