"""PRISM's write: L corrections that take a residual down, from the input alone.

gelu     δ_l = GELU(p_l ⊙ r_l),   r_{l+1} = r_l - δ_l
closed   δ_l = P_l ⊙ r_l,         r_{l+1} = r_l - δ_l,   P = σ(p)     =>   δ_l = P_l ⊙ Π_{j<l}(1 - P_j) ⊙ r
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.kernels import paths

SOLVERS = ("gelu", "closed")
RESIDUALS = ("anchored", "value")


def solve(r: Tensor, p: Tensor | None, steps: int, solver: str, nonlinearity: bool = True) -> Tensor:
    """r `[…, V]`, p `[…, L, V]` (None: no gain) → δ `[…, L, V]`."""
    activate = F.gelu if solver == "gelu" and nonlinearity else _identity
    gains: tuple[Tensor | float, ...]
    if solver == "gelu":
        gains = (1.0,) * steps if p is None else p.unbind(-2)
    else:
        gains = (0.5,) * steps if p is None else (p.sigmoid() if nonlinearity else p).unbind(-2)
    corrections = []
    for gain in gains:
        delta = activate(gain * r)
        corrections.append(delta)
        r = r - delta
    return torch.stack(corrections, -2)


def solved_writes(
    v: Tensor,
    u: Tensor | None,
    p: Tensor | None,
    beta: Tensor,
    scale: Tensor | None,
    solver: str,
    nonlinearity: bool = True,
) -> Tensor:
    """w_l = γ_l ⊙ β_l δ_l for r = v - u (None: r = v): v, u `[…, H, V]`, p `[…, H, L, V]`, β `[…, H, L]`, γ `[L, H, V]`
    or None → `[…, H, L, V]`.

    On a GPU one kernel; the same numbers.
    """
    if paths.fuses(v):
        from prism.engine.kernels import ops_beside

        return ops_beside.solve(v, u, p, beta, scale, solver == "gelu", nonlinearity)
    r = v if u is None else v - u
    w = beta.unsqueeze(-1) * solve(r, p, beta.shape[-1], solver, nonlinearity)
    return w if scale is None else scale.movedim(0, 1).to(w.dtype) * w


def _identity(x: Tensor) -> Tensor:
    return x
