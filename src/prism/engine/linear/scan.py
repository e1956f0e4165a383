"""Compute all states by a prefix scan: each token is an affine map S ↦ P S + D, and composing maps is associative.

Work is linear and depth logarithmic in T, but every state is materialised and, for rules that erase, a composition is a
K×K product. It is a form to reason with, not the fast one. The same maps, of whole parts of a sequence, let several
processes share one (engine/sequence_parallel.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism.engine.update import Steps, Update, steps_of


def scan(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns `[B, T, H, V]` and the memory after the last token."""
    steps = steps_of(update)
    S0 = steps.initial(state)
    P, D = _maps(steps)
    D = torch.cat([(apply_map(P[:, :1], S0.unsqueeze(1)) + D[:, :1]), D[:, 1:]], 1)  # the first map starts from S0
    states = prefixes(P, D)[1]  # [B, R, H, K, V]
    seen = states
    if not steps.read_after:
        seen = torch.cat([S0.unsqueeze(1), states[:, :-1]], 1)
        if steps.reset is not None:
            seen = torch.where(steps.reset[:, :, None, None, None], 0.0, seen)
    return steps.read((steps.q.unsqueeze(-2) @ seen).squeeze(-2)), states[:, -1].clone()  # a view keeps all alive


def _maps(steps: Steps) -> tuple[Tensor, Tensor]:
    """P and D of every row: P `[B, R, H, K, K]`; without an erase its diagonal, `[B, R, H, K, 1]` or `[B, R, H, 1, 1]`."""
    D = steps.k.transpose(-1, -2) @ steps.w
    if steps.log_decay is None:
        decay = D.new_ones(*D.shape[:3], 1, 1)
    elif steps.log_decay.ndim == 3:
        decay = steps.log_decay.exp()[..., None, None]
    else:
        decay = steps.log_decay.exp().unsqueeze(-1)
    P = decay
    if steps.erase_write is not None and steps.erase_key is not None:
        row = steps.erase_key.unsqueeze(-2)  # bᵀ, [B, R, H, 1, K]
        if steps.erase_decayed:
            row = row * decay.transpose(-1, -2)
        K = row.shape[-1]
        P = torch.diag_embed(decay.squeeze(-1).expand(*decay.shape[:3], K)) - steps.erase_write.unsqueeze(-1) * row
    if steps.reset is not None:
        P = torch.where(steps.reset[:, :, None, None, None], 0.0, P)
    return P, D


def is_diagonal(P: Tensor, X: Tensor) -> bool:
    """Whether P `[…, K, 1]` or `[…, 1, 1]` is the diagonal of a matrix that multiplies X `[…, K, V]`."""
    return P.shape[-1] == 1 and P.shape[-2] in (1, X.shape[-2])


def apply_map(P: Tensor, X: Tensor) -> Tensor:
    """P X, for a matrix or a diagonal P."""
    return P * X if is_diagonal(P, X) else P @ X


def _compose(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map that applies `first`, then `then`."""
    return apply_map(then[0], first[0]), apply_map(then[0], first[1]) + then[1]


def prefixes(P: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """All prefix compositions along dimension 1: pair up neighbours, scan the pairs, fill in the rest.

    P `[B, R, H, K, K]`, or a diagonal `[B, R, H, K, 1]`, and D `[B, R, H, K, V]`.
    """
    rows = D.shape[1]
    if rows == 1:
        return P, D
    even, odd = (P[:, 0::2], D[:, 0::2]), (P[:, 1::2], D[:, 1::2])
    pairs = odd[0].shape[1]
    at_odd = prefixes(*_compose((even[0][:, :pairs], even[1][:, :pairs]), odd))
    later = even[0].shape[1] - 1
    at_even = _compose((at_odd[0][:, :later], at_odd[1][:, :later]), (even[0][:, 1:], even[1][:, 1:]))
    return _interleave(even[0], at_even[0], at_odd[0], rows), _interleave(even[1], at_even[1], at_odd[1], rows)


def _interleave(even: Tensor, later: Tensor, at_odd: Tensor, rows: int) -> Tensor:
    """The prefixes at even places (the first of `even`, then `later`) and at odd places, in order."""
    at_even = torch.cat([even[:, :1], later], 1)
    if at_even.shape[1] > at_odd.shape[1]:
        at_odd = torch.cat([at_odd, at_odd[:, -1:]], 1)
    return torch.stack([at_even, at_odd], 2).flatten(1, 2)[:, :rows]
