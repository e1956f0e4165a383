"""The chunk form for one decay per head (or none), with its backward written out: the fast path on the CPU.

Autograd through the block equations would keep every C×C matrix of the sequence; this keeps four numbers-per-channel a
token (T⁻¹, R, P and the incoming state of each chunk) and recomputes the rest. Symbols are those of block.py. Join the
erase with the writes, X = [A; K_1 … K_L] and Y = [-R; W_1 … W_L], and the two kinds of rows, Z = [B; Q]:

    M = (B Xᵀ) ⊙ Γ,  N = (Q Xᵀ) ⊙ Γ,  T = I + M_A                R = T⁻¹((B ⊙ e^G) S + M_K W)
    O = (Q ⊙ e^G) S + N Y                                        S' = e^{G_C} S + (X ⊙ e^{G_C - G})ᵀ Y = P S + D

Backward, from dO and dS'. Because Y's first part is -R, the erase needs no terms of its own:

    dY = Nᵀ dO + (X ⊙ e^{G_C - G}) dS'                           dU = -T⁻ᵀ dY_A          (U: the right-hand side of R)
    dM = dU Yᵀ,  dN = dO Yᵀ                                      dW = dY_K + M_Kᵀ dU
    dZ = ([dM; dN] ⊙ Γ) X + e^G ⊙ ([dU; dO] Sᵀ)                  dX = ([dM; dN] ⊙ Γ)ᵀ Z + e^{G_C - G} ⊙ (Y dS'ᵀ)
    dS = (Q ⊙ e^G)ᵀ dO + (B ⊙ e^G)ᵀ dU + e^{G_C} dS' = Pᵀ dS' + what dO alone gives

and G receives, from every weight exp(G_i - G_j), +(dΓ Γ)_ij at i and the same with a minus at j.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prism.engine.decay import Documents, HeadDecay
from prism.engine.steps import Steps


class Kind(NamedTuple):
    """What does not depend on the data."""

    chunk: int
    segment: int
    look_before: bool
    """The erase looks at the undecayed state."""
    read_before: bool


class Weights(NamedTuple):
    """The decays of a segment's chunks. `z` counts the kinds of rows: the queries, preceded by the erase keys if any."""

    gamma: Tensor  # [B, H, N, z, C, 1, C]
    start: Tensor  # [B, H, N, z, C, 1]
    end: Tensor  # [B, H, N, 1, C, 1]
    carry: Tensor  # [B, H, N, 1, 1]


class Segment(NamedTuple):
    """A segment's tensors, laid out in chunks."""

    z: Tensor  # [B, H, N, z·C, K]
    x: Tensor  # [B, H, N, J·C, K]
    w: Tensor  # [B, H, N, L·C, V]
    weights: Weights


def head_chunks(steps: Steps, S: Tensor, chunk: int, segment: int) -> tuple[Tensor, Tensor]:
    """The outputs `[B, R, H, V]` and the memory after the last row."""
    kind = Kind(chunk, segment, not steps.erase_decayed, not steps.read_after)
    fields = (steps.q, steps.k, steps.w, steps.log_decay, steps.erase_write, steps.erase_key)
    wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*fields, S))
    if not wants_gradient:
        o, S, _ = _forward(fields, steps.reset, S, kind, keep=False)
        return o, S
    o, S = _HeadChunks.apply(*fields, steps.reset, S, kind)
    return o, S


class _HeadChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *fields, reset, S, kind = arguments
        o, end, kept = _forward(tuple(fields), reset, S, kind, keep=True)
        ctx.kind = kind
        ctx.save_for_backward(*fields, reset, *[x for each in kept for x in each])
        return o, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        *fields, reset = ctx.saved_tensors[:7]
        flat = ctx.saved_tensors[7:]
        kept = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        return (*_backward(tuple(fields), reset, kept, dO, dS, ctx.kind), None)


def _forward(fields: tuple, reset: Tensor | None, S: Tensor, kind: Kind, keep: bool) -> tuple[Tensor, Tensor, list]:
    w = fields[2]
    rows, erases = w.shape[1], fields[4] is not None
    o = w.new_empty(w.shape[0], rows, w.shape[2], w.shape[-1])
    kept = []
    for start in range(0, rows, kind.segment):
        length = min(kind.segment, rows - start)
        z, x, w, weights = _segment(fields, reset, start, length, kind)
        C = weights.gamma.shape[-1]
        weighted_rows = _scale(z, weights.start)
        x_end = _scale(x, weights.end)
        MN = _gram(z, x, weights.gamma)
        D = x_end[..., -w.shape[-2] :, :].mT @ w
        inverse = R = R1 = P = None
        if erases:
            M = MN[..., :C, :]
            inverse = _inverse(M[..., :C])
            R, R1 = inverse @ (M[..., C:] @ w), inverse @ weighted_rows[..., :C, :]
            a_end = x_end[..., :C, :].mT
            D -= a_end @ R
            P = -(a_end @ R1)
            P.diagonal(dim1=-2, dim2=-1).add_(weights.carry.squeeze(-1))
        incoming, S = _chain(P, weights.carry, D, S)
        if R is not None and R1 is not None:
            R += R1 @ incoming
        y = w if R is None else torch.cat([-R, w], -2)
        part = weighted_rows[..., -C:, :] @ incoming
        part += MN[..., -C:, :] @ y
        o[:, start : start + length] = _unlay(part, length)
        if keep:
            kept.append((inverse, R, P, incoming))
    return o, S, kept


def _backward(
    fields: tuple, reset: Tensor | None, kept: list, dO: Tensor, dS: Tensor, kind: Kind
) -> tuple[Tensor | None, ...]:
    erases = fields[4] is not None
    rows = fields[0].shape[1]
    d_q, d_k, d_w, d_g, d_a, d_b = (None if x is None else torch.empty_like(x) for x in fields)
    assert d_q is not None and d_k is not None and d_w is not None
    for index in reversed(range(len(kept))):
        start = index * kind.segment
        length = min(kind.segment, rows - start)
        span = slice(start, start + length)
        z, x, w, weights = _segment(fields, reset, start, length, kind)
        inverse, R, P, incoming = kept[index]
        C, L = weights.gamma.shape[-1], w.shape[-2] // weights.gamma.shape[-1]
        weighted_rows = _scale(z, weights.start)
        x_end = _scale(x, weights.end)
        MN = _gram(z, x, weights.gamma)
        y = w if R is None else torch.cat([-R, w], -2)
        d_o = _lay(dO[:, span], C)

        d_y = MN[..., -C:, :].mT @ d_o
        d_in = weighted_rows[..., -C:, :].mT @ d_o
        if erases:
            d_in -= weighted_rows[..., :C, :].mT @ (inverse.mT @ d_y[..., :C, :])
        outgoing, after = _chain_back(P, weights.carry, d_in, dS)
        d_y += x_end @ outgoing
        d_rows = d_o
        if erases:
            d_u = -(inverse.mT @ d_y[..., :C, :])
            d_y[..., C:, :] += MN[..., :C, C:].mT @ d_u
            d_rows = torch.cat([d_u, d_o], -2)
        d_w[:, span] = _unlay(d_y[..., -L * C :, :], length, writes=L)

        d_MN = d_rows @ y.mT
        from_state = _scale(d_rows @ incoming.mT, weights.start)
        into_state = _scale(y @ outgoing.mT, weights.end)
        if d_g is not None:
            d_g[:, span] = _unlay(
                _decay_gradient(d_MN, MN, z, x, from_state, into_state, outgoing, incoming, weights, kind), length
            )
        d_MN = (_grid(d_MN, C) * weights.gamma).flatten(-4, -3).flatten(-2)
        d_z = torch.add(d_MN @ x, from_state)
        d_x = torch.add(d_MN.mT @ z, into_state)
        d_q[:, span] = _unlay(d_z[..., -C:, :], length)
        d_k[:, span] = _unlay(d_x[..., -L * C :, :], length, writes=L)
        if d_a is not None and d_b is not None:
            d_a[:, span], d_b[:, span] = _unlay(d_x[..., :C, :], length), _unlay(d_z[..., :C, :], length)
        dS = after
    return d_q, d_k, d_w, d_g, d_a, d_b, None, dS


def _decay_gradient(
    d_MN: Tensor,
    MN: Tensor,
    z: Tensor,
    x: Tensor,
    from_state: Tensor,
    into_state: Tensor,
    outgoing: Tensor,
    incoming: Tensor,
    weights: Weights,
    kind: Kind,
) -> Tensor:
    """dg `[B, H, N, C]`. A weight on the diagonal is exp(0): it is left out, or its two halves would cancel only up to
    rounding and drown the gradient of a strong decay."""
    C = weights.gamma.shape[-1]
    pairs = _grid(d_MN * MN, C)  # [..., z, C, J, C]
    if not kind.read_before:
        pairs[..., -1, :, :, :].diagonal(dim1=-3, dim2=-1).zero_()
    at_rows = pairs.sum((-2, -1)) + _grid_rows((z * from_state).sum(-1), C)  # [..., z, C]
    into = _grid_rows((x * into_state).sum(-1), C).sum(-2)  # [..., C]
    into[..., -1] = 0
    at_columns = pairs.sum((-4, -3, -2)) + into
    total = into.sum(-1) + (weights.carry.squeeze(-1) * (outgoing * incoming).sum(-1)).sum(-1)
    d_G = -at_columns.double()
    d_G[..., -1] += total
    before = [kind.look_before, kind.read_before] if at_rows.shape[-2] == 2 else [kind.read_before]
    for rows, uses_previous in zip(at_rows.double().unbind(-2), before, strict=True):
        if uses_previous:  # G_{i-1}; the first row's is the constant 0
            d_G[..., :-1] += rows[..., 1:]
        else:
            d_G += rows
    return d_G.flip(-1).cumsum(-1).flip(-1).to(MN.dtype)


def _segment(fields: tuple, reset: Tensor | None, start: int, length: int, kind: Kind) -> Segment:
    q, k, w, g, a, b = (None if x is None else x.narrow(1, start, length) for x in fields)
    C = min(kind.chunk, length)
    rows, columns, values = _lay(q, C), _lay(k, C, writes=True), _lay(w, C, writes=True)
    zero = rows.new_zeros(rows.shape[:-1])
    documents = None if reset is None else Documents(_lay(reset.narrow(1, start, length).unsqueeze(2), C))
    decay = HeadDecay(zero if g is None else _lay(g, C), documents)
    looks = [(kind.read_before, kind.read_before)]  # (before, strict)
    if a is not None:
        looks.insert(0, (kind.look_before, True))
        rows, columns = torch.cat([_lay(b, C), rows], -2), torch.cat([_lay(a, C), columns], -2)
    one = torch.ones((), dtype=rows.dtype, device=rows.device)
    return Segment(
        rows,
        columns,
        values,
        Weights(
            torch.stack([decay.weights(strict, before) for before, strict in looks], 3).unsqueeze(-2),
            torch.stack([decay.from_start(one, before) for before, _ in looks], 3),
            decay.to_end(one),
            decay.carry().unsqueeze(-1),
        ),
    )


def _inverse(strictly_lower: Tensor) -> Tensor:
    """(I + L)⁻¹ by forward substitution."""
    eye = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype, device=strictly_lower.device)
    return torch.linalg.solve_triangular(
        strictly_lower, eye.expand_as(strictly_lower), upper=False, unitriangular=True
    )


def _chain(P: Tensor | None, carry: Tensor, D: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state each chunk starts from `[B, H, N, K, V]`, and the one after the last: the only serial part."""
    incoming = torch.empty_like(D)
    for n in range(D.shape[2]):
        incoming[:, :, n] = S
        S = torch.add(D[:, :, n], carry[:, :, n] * S if P is None else P[:, :, n] @ S)
    return incoming, S


def _chain_back(P: Tensor | None, carry: Tensor, d_in: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of each chunk's outgoing state, and of the first incoming one."""
    outgoing = torch.empty_like(d_in)
    for n in reversed(range(d_in.shape[2])):
        outgoing[:, :, n] = dS
        dS = torch.add(d_in[:, :, n], carry[:, :, n] * dS if P is None else P[:, :, n].mT @ dS)
    return outgoing, dS


def _gram(z: Tensor, x: Tensor, gamma: Tensor) -> Tensor:
    """(Z Xᵀ) ⊙ Γ, `[B, H, N, z·C, J·C]`."""
    product = z @ x.mT
    _grid(product, gamma.shape[-1]).mul_(gamma)
    return product


def _grid(matrix: Tensor, C: int) -> Tensor:
    """`[…, z·C, J·C]` → `[…, z, C, J, C]`."""
    return matrix.unflatten(-1, (-1, C)).unflatten(-3, (-1, C))


def _grid_rows(vector: Tensor, C: int) -> Tensor:
    """`[…, J·C]` → `[…, J, C]`."""
    return vector.unflatten(-1, (-1, C))


def _scale(rows: Tensor, weight: Tensor) -> Tensor:
    """`[…, z·C, K]` times a weight a row, `[…, z or 1, C, 1]`."""
    return (rows.unflatten(-2, (-1, weight.shape[-2])) * weight).flatten(-3, -2)


def _lay(x: Tensor, C: int, writes: bool = False) -> Tensor:
    """`[B, R, H, …]` → `[B, H, N, C, …]` (writes: `[B, H, N, L·C, …]`), padded with zero rows: identities."""
    short = -x.shape[1] % C
    if short:
        x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
    x = x.unflatten(1, (-1, C)).movedim(3, 1)
    return x.transpose(-3, -2).flatten(-3, -2) if writes else x.contiguous()


def _unlay(x: Tensor, length: int, writes: int | None = None) -> Tensor:
    """The inverse of `_lay`."""
    if writes is not None:
        x = x.unflatten(-2, (writes, -1)).transpose(-3, -2)
    return x.flatten(2, 3).transpose(1, 2)[:, :length]
