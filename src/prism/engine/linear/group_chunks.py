"""The chunk form without an erase, forward and backward, for one decay per head (or none).

G heads of queries and keys serve H = G·r heads of values. With the symbols of head_chunks.py, X = K and Y = W:

    O = e^G ⊙ (Q S) + ((Q Xᵀ) ⊙ Γ) Y                     S' = e^{G_C} S + Xᵀ (e^{G_C - G} ⊙ Y)

Only Γ, e^G and Y differ between the heads of a group. So Q Xᵀ is made once for a group, and the products with states are
made for all its heads at once, their values side by side in `[n, C, r·V]`, n = N·B·G. Backward, from dO and dS':

    dY = (QXᵀ ⊙ Γ)ᵀ dO + e^{G_C - G} ⊙ (X dS')           dS = e^{G_C} dS' + Qᵀ (e^G ⊙ dO)
    dA = Σ_heads dO Yᵀ ⊙ Γ,   dQ = dA X + (e^G ⊙ dO) Sᵀ,   dX = dAᵀ Q + (e^{G_C - G} ⊙ Y) dS'ᵀ
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine.linear.chunk_rows import copy_from_chunks, copy_to_chunks
from prism.engine.linear.chunk_segment import Kind, decay_gradient, decay_of, segment_rows


class _Segment(NamedTuple):
    q: Tensor  # [n, C, K]
    x: Tensor  # [n, L·C, K]
    y: Tensor  # [n, r, L, C, V]
    gamma: Tensor  # [n, r, C, 1, C]
    start: Tensor  # [n, r, C, 1]
    end: Tensor  # [n, r, 1, C, 1]
    carry: Tensor  # [n, 1, r, 1]


def forward(
    fields: tuple, reset: Tensor | None, S: Tensor, kind: Kind, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The outputs `[B, R, H, V]`, the memory after the last row, and with `keep` the incoming states of each segment."""
    w = fields[2]
    B, rows, H, _, V = w.shape
    G = fields[0].shape[2]
    o = w.new_empty(B, rows, H, V)
    kept: list[Tensor] = []
    segment = segment_rows(fields, kind)
    S = S.unflatten(1, (G, -1)).movedim(2, 3).flatten(0, 1)  # [B·G, K, r, V]
    for start in range(0, rows, segment):
        length = min(segment, rows - start)
        s = _segment(fields, reset, start, length, kind)
        incoming, S = _chain(s.x, _wide(s.y, s.end), s.carry, S)
        N = _attention(s)
        part = torch.bmm(N.flatten(0, 1), s.y.flatten(2, 3).flatten(0, 1)).view_as(s.y[:, :, 0])
        part.addcmul_(_heads(s.q @ incoming.flatten(2), s)[:, :, 0], s.start)
        copy_from_chunks(o, part.flatten(0, 1), start, length)
        if keep:
            kept.append(incoming)
    return o, _state(S, B), kept


def backward(
    fields: tuple, reset: Tensor | None, kept: list[Tensor], dO: Tensor, dS: Tensor, kind: Kind
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of q, k, w, the log-decay and the incoming memory."""
    q, k, w, g = fields[:4]
    d_q, d_k, d_w = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
    d_g = None if g is None else torch.empty_like(g)
    B, rows, G = q.shape[:3]
    segment = segment_rows(fields, kind)
    dS = dS.unflatten(1, (G, -1)).movedim(2, 3).flatten(0, 1)
    for index in reversed(range(len(kept))):
        start = index * segment
        length = min(segment, rows - start)
        s, incoming = _segment(fields, reset, start, length, kind), kept[index]
        d_o = torch.empty_like(s.y[:, :, 0])  # [n, r, C, V]
        copy_to_chunks(d_o.flatten(0, 1), dO, start, length)
        d_start, y_end = _wide(d_o.unsqueeze(2), s.start.unsqueeze(2)), _wide(s.y, s.end)
        outgoing, dS = _chain_back(s.q, d_start, s.carry, dS)

        N, y = _attention(s), s.y.flatten(2, 3).flatten(0, 1)
        d_y = torch.bmm(N.flatten(0, 1).mT, d_o.flatten(0, 1)).view_as(s.y)
        from_end = s.x @ outgoing.flatten(2)  # [n, L·C, r·V]
        d_y.addcmul_(_heads(from_end, s), s.end)
        copy_from_chunks(d_w, d_y.flatten(2, 3).flatten(0, 1), start, length)

        d_N = torch.bmm(d_o.flatten(0, 1), y.mT).view_as(N).unflatten(-1, (-1, s.gamma.shape[-1]))
        if d_g is not None:
            from_state = d_start.mul(s.q @ incoming.flatten(2))
            into_state = from_end.mul_(y_end)
            d_decay = decay_gradient(
                [(N.view_as(d_N).mul_(d_N).flatten(0, 1), _sums(from_state, s)[:, 0], kind.read_before)],
                _sums(into_state, s).sum(1),
                s.carry.flatten() * (outgoing * incoming).sum((1, 3)).flatten(),
            )
            copy_from_chunks(d_g, d_decay, start, length)
        d_A = d_N.mul_(s.gamma).sum(1).flatten(2)  # [n, C, L·C]
        copy_from_chunks(d_q, (d_A @ s.x).baddbmm_(d_start, incoming.flatten(2).mT), start, length)
        copy_from_chunks(d_k, (d_A.mT @ s.q).baddbmm_(y_end, outgoing.flatten(2).mT), start, length)
    return d_q, d_k, d_w, d_g, _state(dS, B)


def _segment(fields: tuple, reset: Tensor | None, start: int, length: int, kind: Kind) -> _Segment:
    """The tensors of rows start … start + length."""
    q, k, w, g = fields[:4]
    (B, rows, G, K), (H, L, V) = q.shape, w.shape[2:]
    C = min(kind.chunk, rows)
    n, r = -(-length // C) * B * G, H // G
    rows_q, x, y = q.new_empty(n, C, K), q.new_empty(n, L * C, K), w.new_empty(n * r, L * C, V)
    copy_to_chunks(rows_q, q, start, length)
    copy_to_chunks(x, k, start, length)
    copy_to_chunks(y, w, start, length)
    decay = decay_of(y, g, reset, start, length, C, H)
    before, one = kind.read_before, w.new_ones(())
    return _Segment(
        rows_q,
        x,
        y.view(n, r, L, C, V),
        decay.weights(strict=before, before=before).view(n, r, C, 1, C),
        decay.from_start(one, before).view(n, r, C, 1),
        decay.to_end(one).view(n, r, 1, C, 1),
        decay.carry().view(n, 1, r, 1),
    )


def _attention(s: _Segment) -> Tensor:
    """(Q Xᵀ) ⊙ Γ, `[n, r, C, L·C]`."""
    product = (s.q @ s.x.mT).unflatten(2, (-1, s.gamma.shape[-1]))
    return (product.unsqueeze(1) * s.gamma).flatten(3)


def _wide(y: Tensor, weight: Tensor) -> Tensor:
    """`[n, r, L, C, V]` ⊙ weight as `[n, L·C, r·V]`: the heads of a group side by side."""
    n, r, L, C, V = y.shape
    wide = y.new_empty(n, L, C, r, V)
    torch.mul(y, weight, out=wide.permute(0, 3, 1, 2, 4))
    return wide.view(n, L * C, r * V)


def _heads(wide: Tensor, s: _Segment) -> Tensor:
    """`[n, L·C, r·V]` → a view `[n, r, L, C, V]`."""
    _, r, _, C, V = s.y.shape
    return wide.unflatten(2, (r, V)).unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)


def _sums(wide: Tensor, s: _Segment) -> Tensor:
    """Σ_v of `[n, L·C, r·V]`, `[m, L, C]`."""
    _, r, _, C, V = s.y.shape
    return wide.unflatten(2, (r, V)).sum(-1).unflatten(1, (-1, C)).movedim(3, 1).flatten(0, 1)


def _chain(x: Tensor, y_end: Tensor, carry: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state each chunk starts from `[n, K, r, V]`, and the one after the last `[B·G, K, r, V]`."""
    width = len(S)
    states = S.new_empty(len(x) + width, *S.shape[1:])
    states[:width] = S
    torch.bmm(x.mT, y_end, out=states[width:].flatten(2))
    each = states.split(width)
    for now, following, c in zip(each, each[1:], carry.split(width), strict=False):
        following.addcmul_(c, now)
    return states[:-width], states[-width:].clone()


def _chain_back(q: Tensor, d_start: Tensor, carry: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of each chunk's outgoing state `[n, K, r, V]`, and of the first incoming one `[B·G, K, r, V]`."""
    width = len(dS)
    gradients = dS.new_empty(len(q) + width, *dS.shape[1:])
    gradients[-width:] = dS
    torch.bmm(q.mT, d_start, out=gradients[:-width].flatten(2))
    each = gradients.split(width)
    for now, following, c in reversed(list(zip(each, each[1:], carry.split(width), strict=False))):
        now.addcmul_(c, following)
    return gradients[width:], gradients[:width]


def _state(S: Tensor, B: int) -> Tensor:
    """`[B·G, K, r, V]` → `[B, H, K, V]`."""
    return S.movedim(2, 1).unflatten(0, (B, -1)).flatten(1, 2).contiguous()
