"""From what a delta rule reads off the input to what its memory is told.

q = K^-½ · unit(q̃),   k_1 = unit(k̃),   w_1 = β v;   and of PRISM's corrections   k_l = unit(k̃_l),   w_l = γ_l β_l δ_l
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine.kernels import paths
from prism.rules.parts import UNIT_EPS, l2_normalize, split_heads
from prism.rules.solver import solved_writes


class Corrections(NamedTuple):
    """What PRISM reads off its anchor for the N = L - 1 writes that follow a token's first."""

    keys: Tensor | None  # [B, T, H, N, K]; None: all go along the first key
    expected: Tensor | None  # [B, T, H, V], what the residual is taken from v by; None: the residual is v
    gains: Tensor | None  # [B, T, H, N, V]
    beta: Tensor  # [B, T, H, N]
    scale: Tensor  # [N, H, V]
    solver: str
    nonlinearity: bool


class Columns(NamedTuple):
    """n sub-steps of a token are n rows of k and w."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T·n, H, L, K]
    w: Tensor  # [B, T·n, H, L, V]


def columns(
    mixed: Tensor, beta: Tensor, key_dim: int, substeps: int = 1, corrections: Corrections | None = None
) -> Columns:
    """mixed `[B, T, H·K + n·H·K + n·H·V]` holds q̃, k̃ and v; β `[B, T·n, H]`. On a GPU one kernel; the same numbers."""
    heads = beta.shape[-1]
    keys = heads * key_dim
    if substeps == 1 and paths.fuses(mixed):
        return _fused(mixed, beta, key_dim, corrections)
    q, k, v = mixed.split([keys, substeps * keys, mixed.shape[-1] - (1 + substeps) * keys], -1)

    def rows(z: Tensor) -> Tensor:  # [B, T, n·H·D] -> [B, T·n, H, D]
        return z.unflatten(-1, (substeps, heads, -1)).flatten(1, 2)

    q, k, v = l2_normalize(split_heads(q, heads)) * key_dim**-0.5, l2_normalize(rows(k)).unsqueeze(3), rows(v)
    w = (beta.unsqueeze(-1) * v).unsqueeze(3)
    if corrections is None:
        return Columns(q, k, w)
    c = corrections
    later = k.expand(-1, -1, -1, c.beta.shape[-1], -1) if c.keys is None else l2_normalize(c.keys)
    writes = solved_writes(v, c.expected, c.gains, c.beta, c.scale, c.solver, c.nonlinearity)
    return Columns(q, torch.cat([k, later], 3), torch.cat([w, writes], 3))


def _fused(mixed: Tensor, beta: Tensor, key_dim: int, c: Corrections | None) -> Columns:
    from prism.engine.kernels import ops_beside

    given = (None,) * 5 if c is None else (c.keys, c.expected, c.gains, c.beta, c.scale)
    gelu, nonlinear = (False, False) if c is None else (c.solver == "gelu", c.nonlinearity)
    return Columns(*ops_beside.columns(mixed, beta, *given, key_dim, key_dim**-0.5, UNIT_EPS, gelu, nonlinear))
