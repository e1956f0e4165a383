"""Pass the state from chunk to chunk: the only serial part of the chunk form with an erase (erase_chunks.py).

All chunks of a segment stand in one tensor, m = N·B·H of them, the first chunk of every row and head first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chain(F: Tensor, carry: Tensor, x_end: Tensor, y: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The state each chunk starts from `[m, K, V]`, and the one after the last `[B, H, K, V]`.

    Args:
        F: what the erase sees of the incoming state, `[m, C, K]`.
        carry: `[m, 1, 1]`.
        x_end: X ⊙ e^{G_C - G}, `[m, J·C, K]`.
        y: Y, `[m, J·C, V]`, as it is for S = 0; F S is subtracted from its first C rows, in place.
        S: the state before the first chunk, `[B, H, K, V]`.
    """
    width = S.shape[0] * S.shape[1]
    states = y.new_empty(y.shape[0] + width, *S.shape[2:])
    states[:width] = S.flatten(0, 1)
    each = states.split(width)
    parts = (x.split(width) for x in (F, carry, x_end.mT, y, y[:, : F.shape[1]]))
    for now, following, f, c, x, writes, first in zip(each, each[1:], *parts, strict=False):
        first.baddbmm_(f, now, alpha=-1)
        torch.mul(now, c, out=following).baddbmm_(x, writes)
    return states[:-width], states[-width:].view_as(S).clone()


def chain_back(
    F: Tensor, carry: Tensor, q_start: Tensor, x_end: Tensor, d_o: Tensor, d_y: Tensor, dS: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of each chunk's outgoing state `[m, K, V]`, and of the first incoming one `[B, H, K, V]`.

    Args:
        F, carry, x_end: as for `chain`.
        q_start: Q ⊙ e^G, `[m, C, K]`.
        d_o: `[m, C, V]`.
        d_y: the gradient of Y from the outputs, `[m, J·C, V]`; that from the states is added, in place.
        dS: the gradient of the state after the last chunk, `[B, H, K, V]`.
    """
    width = dS.shape[0] * dS.shape[1]
    gradients = dS.new_empty(d_o.shape[0] + width, *dS.shape[2:])
    gradients[-width:] = dS.flatten(0, 1)
    torch.bmm(q_start.mT, d_o, out=gradients[:-width])
    each = gradients.split(width)
    parts = (x.split(width) for x in (F.mT, carry, x_end, d_y, d_y[:, : F.shape[1]]))
    for now, following, f, c, x, writes, first in reversed(list(zip(each, each[1:], *parts, strict=False))):
        writes.baddbmm_(x, following)
        now.addcmul_(c, following).baddbmm_(f, first, alpha=-1)
    return gradients[width:], gradients[:width].view_as(dS)
