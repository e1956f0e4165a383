"""GLA and HGRN2: linear attention with a decay per key channel.

    S_t = Diag(α_t) S_{t-1} + k_t v_tᵀ

    GLA     α = σ(W₂W₁x + b)^{1/16}, a low-rank gate                                              (Yang et al., 2023)
    HGRN2   α = f = γ + (1 - γ)σ(W_f x) and k = 1 - f: a channel is written as much as it forgets   (Qin et al., 2024)

HGRN2's lower bound γ grows with the layer: it is the sum of a softmax over all layers, taken over layers 1 … ℓ, so layer 0
has none. Published models have one table of logits for the whole stack. Here every layer has its own table, with the same
initial values (zeros: γ = ℓ/Λ), so that a layer can be built, saved and trained alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.parts import Carry, LowRank, split_heads
from prism.rules.parts.decays import bounded_decay, log_lower_bound, log_sigmoid_decay
from prism.rules.parts.norms import HeadNorm, WidthNorm
from prism.rules.rule import DECAYED_CORRELATION, Paper, Span, depth, per_head, set_initial_weights


class Gla(HebbianFamily):
    """Gated linear attention: a low-rank decay per key channel.

    Defaults as published: H·K = width / 2, H·V = width, a gate of rank 16.

    Args:
        key_dim: size of a head's queries and keys; width / (2 · heads) by default.
        gate_rank: rank of the linear map to the decay.
    """

    name = "gla"
    paper = Paper("Gated Linear Attention Transformers", "Yang et al. 2023", "https://arxiv.org/abs/2312.06635")
    objective = DECAYED_CORRELATION
    forgetting = "per channel"
    transition = "diagonal"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        conv_size: int = 1,
    ) -> None:
        K, V = per_head(width, heads, key_dim, ratio=0.5), per_head(width, heads, value_dim)
        super().__init__(width, heads, K, V, conv_size=conv_size, activation=conv_size > 1)
        self.decay_in = LowRank(width, heads * K, gate_rank, bias=True)
        self.norm = HeadNorm(V)
        self.gate = nn.Linear(width, heads * V, bias=False)

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        log_decay = split_heads(log_sigmoid_decay(self.decay_in(x)), self.heads)
        return p._replace(q=p.q * self.key_dim**-0.5, log_decay=log_decay)


class Hgrn2(HebbianFamily):
    """HGRN2: a bounded decay per key channel, whose complement is the key.

    Defaults as published: K = V = width / heads (128). SiLU on q only; the output is normalised over all heads, ungated.
    """

    name = "hgrn2"
    paper = Paper("HGRN2", "Qin et al. 2024", "https://arxiv.org/abs/2404.07904")
    objective = DECAYED_CORRELATION
    forgetting = "per channel, bounded below"
    transition = "diagonal"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 1,
        layer_index: int = 0,
        layer_count: int = 1,
    ) -> None:
        depth(layer_index, layer_count)  # checks them
        K, V = per_head(width, heads, key_dim), per_head(width, heads, value_dim)
        super().__init__(width, heads, K, V, conv_size=conv_size, activation=False)
        self.layer_index = layer_index
        self.bound = nn.Parameter(torch.empty(layer_count, heads * K))
        set_initial_weights(self)
        self.norm = WidthNorm(heads, V)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"bound": torch.zeros(self.bound.shape)}

    def log_bound(self) -> tuple[Tensor, Tensor]:
        """log γ and log(1 - γ), each `[H, K]`; layer 0 has γ = 0, an empty sum."""
        return log_lower_bound(split_heads(self.bound, self.heads), self.layer_index)

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        # The projection in the key's place holds the logits of f.
        log_decay, k = bounded_decay(p.k, self.log_bound())
        return p._replace(q=F.silu(p.q) * self.key_dim**-0.5, k=k.to(p.v.dtype), log_decay=log_decay)
