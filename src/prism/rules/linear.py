"""Linear attention: every token adds its value along its key, nothing is ever forgotten.

    S_t = S_{t-1} + φ(k_t) v_tᵀ                                     (Katharopoulos et al., 2020)

Two versions. `normalize=True` is the original: φ = elu + 1 and o = Sᵀφ(q) / (zᵀφ(q) + ε) with z_t = Σ φ(k), computed as an
extra value column of ones. The default is the modern one: no z, queries scaled by K^-½, RMSNorm on every head's output.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from prism.rules.hebbian import HebbianFamily, Projections
from prism.rules.parts import Carry, with_normaliser
from prism.rules.parts.norms import HeadNorm
from prism.rules.rule import CORRELATION, Paper, Span, check_nonnegative, per_head

_FEATURES = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "identity": lambda x: x}
_POSITIVE = ("elu", "relu")


class Linear(HebbianFamily):
    """Linear attention, by default without a normaliser.

    Args:
        normalize: whether the output is divided by zᵀφ(q), as in the original; the default is RMSNorm on every head.
        feature_map: φ of queries and keys: `"elu"` (elu + 1), `"relu"` or `"identity"`. `normalize` needs a positive one.
        eps: added to zᵀφ(q); only with `normalize`.
    """

    name = "linear"
    paper = Paper("Transformers are RNNs", "Katharopoulos et al. 2020", "https://arxiv.org/abs/2006.16236")
    objective = CORRELATION
    forgetting = "none"
    transition = "I"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        normalize: bool = False,
        feature_map: str = "elu",
        conv_size: int = 1,
        eps: float = 1e-6,
    ) -> None:
        check_nonnegative(eps=eps)
        if feature_map not in _FEATURES:
            raise ValueError(f"feature_map must be one of {', '.join(_FEATURES)}, got {feature_map!r}")
        if normalize and feature_map not in _POSITIVE:
            raise ValueError(f"normalize divides by Σφ(k)·φ(q): it needs a positive feature_map, not {feature_map!r}")
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            conv_size=conv_size,
            activation=conv_size != 1,
        )
        self.normalize, self.feature_map, self.eps = normalize, feature_map, eps
        if normalize:
            self.state_size += heads * self.key_dim
        else:
            self.norm = HeadNorm(self.value_dim)

    def project(self, x: Tensor, carry: Carry, span: Span) -> Projections:
        p = super().project(x, carry, span)
        features = _FEATURES[self.feature_map]
        q, k = features(p.q), features(p.k)
        if self.normalize:
            return p._replace(q=q, k=k, v=with_normaliser(p.v))
        return p._replace(q=q * self.key_dim**-0.5, k=k)

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        if self.normalize:
            return self.out((o[..., :-1] / (o[..., -1:] + self.eps)).flatten(-2))
        return super().output(o, x, extra)
