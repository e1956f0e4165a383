"""Based: linear attention whose features are the Taylor series of softmax's exponential, to second order.

    φ(x) = [1, x / d^¼, vec(x xᵀ) / √(2d)],  so that  φ(q)·φ(k) = 1 + s + s²/2  with  s = qᵀk / √d      (Arora et al., 2024)

That is ≥ ½ for all inputs, so the output is divided by Σφ(q)·φ(k) and needs no norm. The published models are hybrids with
gated short convolutions and sliding-window attention (here a layer pattern).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.parts import Carry, with_normaliser
from prism.rules.rule import Objective, Paper, Span, check_nonnegative, per_head


def taylor_features(x: Tensor) -> Tensor:
    """φ: `[…, d]` → `[…, 1 + d + d²]`."""
    d = x.shape[-1]
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return torch.cat([torch.ones_like(x[..., :1]), x / d**0.25, pairs / math.sqrt(2 * d)], -1)


class Based(HebbianFamily):
    """Based: linear attention with Taylor features of the exponential.

    Defaults as published: d = 16, which makes 273 features, and H·V = width.

    Args:
        key_dim: d, the size of a head's queries and keys before the features.
        eps: added to the divisor of the output.
    """

    name = "based"
    paper = Paper("Simple Linear Attention Language Models", "Arora et al. 2024", "https://arxiv.org/abs/2402.18668")
    objective = Objective("-⟨Sᵀφ(k), v⟩, normalised")
    forgetting = "none"
    transition = "I"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int = 16,
        value_dim: int | None = None,
        conv_size: int = 1,
        eps: float = 1e-12,
    ) -> None:
        V = per_head(width, heads, value_dim)
        super().__init__(width, heads, key_dim, V, conv_size=conv_size, activation=conv_size != 1)
        check_nonnegative(eps=eps)
        self.eps = eps
        self.state_size = heads * (1 + key_dim + key_dim**2) * (V + 1)

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        return p._replace(q=taylor_features(p.q), k=taylor_features(p.k), v=with_normaliser(p.v))

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out((o[..., :-1] / (o[..., -1:] + self.eps)).flatten(-2))
