"""PRISM's write: L corrections that take a residual down, from the input alone.

gelu     δ_l = GELU(p_l ⊙ r_l),   r_{l+1} = r_l - δ_l
closed   δ_l = P_l ⊙ r_l,         r_{l+1} = r_l - δ_l,   P = σ(p)     =>   δ_l = P_l ⊙ Π_{j<l}(1 - P_j) ⊙ r
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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


def _identity(x: Tensor) -> Tensor:
    return x
