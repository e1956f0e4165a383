"""The chunk form for one decay per head (or none), with a hand-written backward: the fast path on the CPU.

Autograd through the block equations would keep every C×C matrix of the sequence. This keeps T⁻¹, R, P and the incoming
state of each chunk, about four numbers per channel and token, and recomputes the rest. Symbols are those of block.py. Join
the erase with the writes, and the two kinds of rows, Z = [B; Q]. Where the erase runs along the first key, a = β k_1, it
shares that key's columns, otherwise it has separate ones and β = 1:

    X = [K_1; …; K_L],  Y = [W_1 - βR; W_2; …; W_L]     or      X = [A; K_1; …; K_L],  Y = [-R; W_1; …; W_L]
    M = (B Xᵀ) ⊙ Γ,  N = (Q Xᵀ) ⊙ Γ,  T = I + M_1 Diag(β)        R = (B ⊙ e^G) S + M Y = T⁻¹((B ⊙ e^G) S + M Y|R=0)
    O = (Q ⊙ e^G) S + N Y                                        S' = e^{G_C} S + (X ⊙ e^{G_C - G})ᵀ Y = P S + D

(M_1: the first C columns.) Backward, from dO and dS'. Because Y has R in its first part, the erase needs no separate terms:

    dY = Nᵀ dO + (X ⊙ e^{G_C - G}) dS'                           dU = -T⁻ᵀ(β ⊙ dY_1)     (U: the right-hand side of R)
    dM = dU Yᵀ,  dN = dO Yᵀ                                      dW = dY + Mᵀ dU,  dβ = -Σ_v R ⊙ dW_1
    dZ = ([dM; dN] ⊙ Γ) X + e^G ⊙ ([dU; dO] Sᵀ)                  dX = ([dM; dN] ⊙ Γ)ᵀ Z + e^{G_C - G} ⊙ (Y dS'ᵀ)
    dS = (Q ⊙ e^G)ᵀ dO + (B ⊙ e^G)ᵀ dU + e^{G_C} dS' = Pᵀ dS' + the part from dO alone

and G receives, from every weight exp(G_i - G_j), +(dΓ Γ)_ij at i and the same with a minus at j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.autocast import without_autocast
from prism.engine.linear.chunk_chain import chain, chain_back, chain_in_turn
from prism.engine.linear.chunk_rows import copy_from_chunks, copy_to_chunks
from prism.engine.linear.decay import Documents, HeadDecay
from prism.engine.linear.steps import Steps
from prism.engine.linear.triangular import unit_lower_inverse


class Kind(NamedTuple):
    """Settings that do not depend on the data."""

    chunk: int
    segment: int
    """At most this many rows at once (`segment_rows`)."""
    look_before: bool
    """The erase reads the undecayed state."""
    read_before: bool
    """Queries read S_{t-1}."""


class Segment(NamedTuple):
    """A segment's tensors, in m = N·B·H chunks, the first chunk of every row and head first.

    The z·C rows are the erase keys (if any) above the queries. The J·C columns are the erase writes (if they are separate)
    above the L write keys.
    """

    z: Tensor  # [m, z·C, K]
    x: Tensor  # [m, J·C, K]
    y: Tensor  # [m, J·C, V], without the erase: zeros where it has separate columns
    strength: Tensor | None  # β, [m, C, 1]; None: 1
    gamma: Tensor  # [m, z, C, 1, C]
    start: Tensor  # [m, z·C, 1]
    end: Tensor  # [m, 1, C, 1]
    carry: Tensor  # [m, 1, 1]

    @property
    def erases(self) -> bool:
        return self.z.shape[1] > self.gamma.shape[-1]


Kept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]
"""A segment's T⁻¹ `[m, C, C]`, -R `[m, C, V]`, P `[m, K, K]` (None without an erase) and incoming states `[m, K, V]`."""

Differentiable = Callable[[Steps, Tensor, int, int], tuple[Tensor, Tensor]]

_CACHED = 2**17
"""Numbers of a segment's queries. Measured: up to a third faster than segments of 512 rows, which outgrow the cache."""

_IN_TURN = 2**12
"""Numbers of all states from which chunks are computed in turn where nothing is kept. Measured: below, calls cost more."""

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
    B, rows, H, L, V = values.shape
    o = values.new_empty(B, rows, H, V)
    kept: list[Kept] = []
    segment = segment_rows(fields, kind)
    for start in range(0, rows, segment):
        length = min(segment, rows - start)
        s = _segment(fields, reset, start, length, kind)
        C = s.gamma.shape[-1]
        z_start, x_end = s.z * s.start, _scale(s.x, s.end)
        MN = _gram(s)
        inverse = P = minus_R = None
        if s.erases:
            inverse = _inverse(s)
            minus_R = torch.bmm(inverse, MN[:, :C, -L * C :] @ s.y[:, -L * C :]).neg_()
            _add_erase(s, minus_R)
            z_start[:, :C] = inverse @ z_start[:, :C]
        if s.erases and not keep and S.numel() >= _IN_TURN:
            incoming, S = chain_in_turn(z_start[:, :C], s.strength, s.carry, x_end, s.y, S)
        else:
            if s.erases:
                P = torch.bmm(x_end[:, :C].mT, _times(z_start[:, :C], s.strength)).neg_()
                P.diagonal(dim1=-2, dim2=-1).add_(s.carry.squeeze(-1))
            incoming, S = chain(P, s.carry, x_end, s.y, S)
            if minus_R is not None:
                seen = z_start[:, :C] @ incoming
                minus_R -= seen
                _add_erase(s, seen.neg_())
        part = z_start[:, -C:] @ incoming
        copy_from_chunks(o, part.baddbmm_(MN[:, -C:], s.y), start, length)
        if keep:
            kept.append((inverse, minus_R, P, incoming))
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
        s = _segment(fields, reset, start, length, kind)
        inverse, minus_R, P, incoming = kept[index]
        C = s.gamma.shape[-1]
        z_start, x_end = s.z * s.start, _scale(s.x, s.end)
        MN = _gram(s)
        d_rows = s.z.new_empty(*s.z.shape[:2], incoming.shape[-1])  # [dU; dO]
        d_o = d_rows[:, -C:]
        copy_to_chunks(d_o, dO, start, length)

        d_y = MN[:, -C:].mT @ d_o
        if inverse is not None and minus_R is not None:
            _add_erase(s, minus_R)
            inverse = _times(inverse, s.strength)
            d_rows[:, :C] = torch.bmm(inverse.mT, d_y[:, :C]).neg_()  # the part from dO alone
        outgoing, dS = chain_back(P, s.carry, z_start, d_rows, dS)
        d_y.baddbmm_(x_end, outgoing)
        if inverse is not None:
            d_rows[:, :C] = torch.bmm(inverse.mT, d_y[:, :C]).neg_()
            d_y.baddbmm_(MN[:, :C].mT, d_rows[:, :C])
        copy_from_chunks(d_w, d_y[:, -L * C :], start, length)
        if d_beta is not None and minus_R is not None:
            copy_from_chunks(d_beta, (minus_R * d_y[:, :C]).sum(-1), start, length)

        d_MN = d_rows @ s.y.mT
        d_z = torch.bmm(d_rows, incoming.mT).mul_(s.start)
        d_x = torch.bmm(s.y, outgoing.mT)
        _grid(d_x, C).mul_(s.end)
        if d_g is not None:
            pairs = _pairs(MN.mul_(d_MN), C, kind)
            d_decay = _decay_gradient(
                pairs, (s.z * d_z).sum(-1), (s.x * d_x).sum(-1), outgoing, incoming, s.carry, kind
            )
            copy_from_chunks(d_g, d_decay, start, length)
        _grid(d_MN.unflatten(-1, (-1, C)), C).mul_(s.gamma)
        d_z.baddbmm_(d_MN, s.x)
        d_x.baddbmm_(d_MN.mT, s.z)
        if s.strength is not None:  # the first key is the erase key too
            d_x[:, :C] += d_z[:, :C]
        copy_from_chunks(d_q, d_z[:, -C:], start, length)
        copy_from_chunks(d_k, d_x[:, -L * C :], start, length)
        if d_a is not None and d_b is not None:
            copy_from_chunks(d_a, d_x[:, :C], start, length)
            copy_from_chunks(d_b, d_z[:, :C], start, length)
    return d_q, d_k, d_w, d_g, d_a, d_b, d_beta, None, dS


def segment_rows(fields: tuple, kind: Kind) -> int:
    """Rows that are computed at once, whole chunks: so many that the temporaries of all rows and heads fit in a cache."""
    B, _, H, _, V = fields[2].shape
    fitting = _CACHED // (B * H * max(V, fields[0].shape[-1]))
    return max(1, min(kind.segment, fitting) // kind.chunk) * kind.chunk


def _add_erase(s: Segment, minus_R: Tensor) -> None:
    """Add β ⊙ minus_R `[m, C, V]` to the first part of Y."""
    first = s.y[:, : minus_R.shape[1]]
    if s.strength is None:
        first += minus_R
    else:
        first.addcmul_(s.strength, minus_R)


def _times(x: Tensor, strength: Tensor | None) -> Tensor:
    return x if strength is None else x * strength


def _pairs(product: Tensor, C: int, kind: Kind) -> Tensor:
    """dΓ ⊙ Γ `[m, z, C, J, C]`.

    A weight on the diagonal is exp(0). It is left out: its two halves would cancel only up to rounding, which is larger
    than the gradient of a strong decay.
    """
    pairs = _grid(product.unflatten(-1, (-1, C)), C)
    if not kind.read_before:
        pairs[:, -1].diagonal(dim1=-3, dim2=-1).zero_()
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
    before = [kind.look_before, kind.read_before] if at_rows.shape[-2] == 2 else [kind.read_before]
    for row, uses_previous in zip(at_rows.double().unbind(-2), before, strict=True):
        if uses_previous:  # G_{i-1}; the first row's is the constant 0
            d_G[:, :-1] += row[:, 1:]
        else:
            d_G += row
    return d_G.flip(-1).cumsum(-1).flip(-1)


def _segment(fields: tuple, reset: Tensor | None, start: int, length: int, kind: Kind) -> Segment:
    """The tensors of rows start … start + length."""
    q, k, w, g, a, b, beta = fields
    B, _, H, K = q.shape
    L, V = w.shape[-2:]
    C = min(kind.chunk, q.shape[1])
    m = -(-length // C) * B * H
    erases, extra = a is not None or beta is not None, 0 if a is None else C

    z, x, y = q.new_empty(m, (1 + erases) * C, K), q.new_empty(m, extra + L * C, K), q.new_empty(m, extra + L * C, V)
    copy_to_chunks(z[:, -C:], q, start, length)
    copy_to_chunks(x[:, extra:], k, start, length)
    copy_to_chunks(y[:, extra:], w, start, length)
    strength = None
    if a is not None:
        copy_to_chunks(z[:, :C], b, start, length)
        copy_to_chunks(x[:, :C], a, start, length)
        y[:, :C] = 0
    elif beta is not None:
        z[:, :C] = x[:, :C]
        strength = q.new_empty(m, C)
        copy_to_chunks(strength, beta, start, length)
        strength = strength.unsqueeze(-1)

    log_decay = q.new_zeros(m, C)
    if g is not None:
        copy_to_chunks(log_decay, g, start, length)
    documents = None
    if reset is not None:
        begins = torch.zeros(m, C, dtype=torch.bool, device=q.device)
        copy_to_chunks(begins, reset.unsqueeze(2).expand(-1, -1, H), start, length)
        documents = Documents(begins)
    decay = HeadDecay(log_decay, documents)
    gamma, left = _row_decays(decay, kind, erases)
    end, carry = decay.to_end(q.new_ones(())), decay.carry().unsqueeze(-1)
    return Segment(z, x, y, strength, gamma.unsqueeze(-2), left, end, carry)


def _row_decays(decay: HeadDecay, kind: Kind, erases: bool) -> tuple[Tensor, Tensor]:
    """Γ `[m, z, C, C]` and e^G `[m, z·C, 1]` as the erase keys (if any) and the queries see them."""
    before = kind.read_before
    one = decay.inclusive.new_ones((), dtype=decay.dtype)
    gamma, left = decay.weights(strict=before, before=before), decay.from_start(one, before)
    if not erases:
        return gamma.unsqueeze(1), left
    if kind.look_before == before:  # the same weights, without the token itself: exponentials are expensive
        both = gamma.unsqueeze(1).repeat(1, 2, 1, 1)
        both[:, 0].diagonal(dim1=-2, dim2=-1).zero_()
        return both, left.repeat(1, 2, 1)
    look = kind.look_before
    return torch.stack([decay.weights(True, look), gamma], 1), torch.cat([decay.from_start(one, look), left], 1)


def _inverse(s: Segment) -> Tensor:
    """T⁻¹ `[m, C, C]`, computed in float64.

    Where reflections (β near 2) meet nearly equal keys, the inverse amplifies the rounding of the Gram matrix.
    """
    C = s.gamma.shape[-1]
    gram = (s.z[:, :C].double() @ s.x[:, :C].double().mT).mul_(s.gamma[:, 0, :, 0])
    if s.strength is not None:
        gram *= s.strength.mT
    return unit_lower_inverse(gram).to(s.z.dtype)


def _gram(s: Segment) -> Tensor:
    """(Z Xᵀ) ⊙ Γ, `[m, z·C, J·C]`."""
    product = s.z @ s.x.mT
    C = s.gamma.shape[-1]
    _grid(product.unflatten(-1, (-1, C)), C).mul_(s.gamma)
    return product


def _grid(rows: Tensor, C: int) -> Tensor:
    """`[m, z·C, …]` → `[m, z, C, …]`."""
    return rows.unflatten(1, (-1, C))


def _scale(rows: Tensor, weight: Tensor) -> Tensor:
    """`[m, J·C, K]` times one weight per token, `[m, 1, C, 1]`."""
    return (_grid(rows, weight.shape[2]) * weight).flatten(1, 2)
