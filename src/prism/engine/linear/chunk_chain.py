"""Pass the state from chunk to chunk: the only serial part of the chunk form with one decay per head (head_chunks.py).

A chunk maps its incoming state to S' = P S + D. With an erase P is a matrix, otherwise the number `carry`. All chunks of a
segment stand in one tensor, m = N·B·H of them, the first chunk of every row and head first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chain(P: Tensor | None, carry: Tensor, x_end: Tensor, y: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state each chunk starts from `[m, K, V]`, and the one after the last `[B, H, K, V]`.

    Args:
        P: `[m, K, K]`; None without an erase.
        carry: `[m, 1, 1]`.
        x_end: X ⊙ e^{G_C - G}, `[m, J·C, K]`.
        y: Y, `[m, J·C, V]`, as it is for S = 0.
        S: the state before the first chunk, `[B, H, K, V]`.
    """
    width = S.shape[0] * S.shape[1]
    states = y.new_empty(y.shape[0] + width, *S.shape[2:])
    states[:width] = S.flatten(0, 1)
    torch.bmm(x_end.mT, y, out=states[width:])  # D
    for n in range(0, y.shape[0], width):
        now, following = slice(n, n + width), slice(n + width, n + 2 * width)
        _advance(None if P is None else P[now], carry[now], states[now], states[following])
    return states[:-width], states[-width:].view_as(S).clone()


def chain_in_turn(
    rows: Tensor, strength: Tensor | None, carry: Tensor, x_end: Tensor, y: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Same results as `chain`, without P: each chunk's erase is added to its Y, in place, before the next chunk starts.

    A third fewer multiplications, but more small operations, and a backward needs P.

    Args:
        rows: T⁻¹(B ⊙ e^G), `[m, C, K]`: what the erase sees of the incoming state.
        strength: β, `[m, C, 1]`; None: 1.
        carry, x_end, y, S: as for `chain`.
    """
    C, width, shape = rows.shape[1], S.shape[0] * S.shape[1], S.shape
    incoming = y.new_empty(y.shape[0], *shape[2:])
    S = S.flatten(0, 1)
    for n in range(0, y.shape[0], width):
        now = slice(n, n + width)
        incoming[now] = S
        seen, writes = rows[now] @ S, y[now]
        if strength is None:
            writes[:, :C] -= seen
        else:
            writes[:, :C].addcmul_(strength[now], seen, value=-1)
        S = (S * carry[now]).baddbmm_(x_end[now].mT, writes)
    return incoming, S.view(shape)


def chain_back(P: Tensor | None, carry: Tensor, z_start: Tensor, d_rows: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of each chunk's outgoing state, and of the first incoming one."""
    width = dS.shape[0] * dS.shape[1]
    gradients = dS.new_empty(d_rows.shape[0] + width, *dS.shape[2:])
    gradients[-width:] = dS.flatten(0, 1)
    torch.bmm(z_start.mT, d_rows, out=gradients[:-width])
    for n in reversed(range(0, d_rows.shape[0], width)):
        now, following = slice(n, n + width), slice(n + width, n + 2 * width)
        _advance(None if P is None else P[now].mT, carry[now], gradients[following], gradients[now])
    return gradients[width:], gradients[:width].view_as(dS)


def _advance(P: Tensor | None, carry: Tensor, S: Tensor, D: Tensor) -> None:
    """P S + D into D; without an erase P is `carry`."""
    if P is None:
        D.addcmul_(carry, S)
    else:
        D.baddbmm_(P, S)
