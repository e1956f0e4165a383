"""Linear attention: every token adds its value along its key, nothing is ever forgotten.

    S_t = S_{t-1} + φ(k_t) v_tᵀ                                     (Katharopoulos et al., 2020)

Two readings. `normalize=True` is the original: φ = elu + 1 and o = Sᵀφ(q) / (zᵀφ(q) + ε) with z_t = Σ φ(k); z is one more
value column of ones. The default is the modern one: no z, queries scaled by K^-½, RMSNorm on every head's output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.rules.norms import HeadNorm
from prism.rules.objectives import CORRELATION
from prism.rules.parts import Carry, ShortConv, split_heads
from prism.rules.rule import Rule, per_head
from prism.rules.span import Span

_FEATURES = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "identity": lambda x: x}
_POSITIVE = ("elu", "relu")


class Linear(Rule):
    name = "linear"
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
        super().__init__(width, heads, per_head(width, heads, key_dim), per_head(width, heads, value_dim))
        if feature_map not in _FEATURES:
            raise ValueError(f"feature_map must be one of {', '.join(_FEATURES)}, got {feature_map!r}")
        if normalize and feature_map not in _POSITIVE:
            raise ValueError(f"normalize divides by Σφ(k)·φ(q): it needs a positive feature_map, not {feature_map!r}")
        self.normalize, self.feature_map, self.eps = normalize, feature_map, eps
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.sizes = [keys, keys, values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size, activation=conv_size > 1)
        self.norm = None if normalize else HeadNorm(self.value_dim)
        self.out = nn.Linear(values, width, bias=False)
        if normalize:
            self.state_size += heads * self.key_dim

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        mixed, window = self.conv(self.qkv(x), carry.get("conv"), span)
        q, k, v = (split_heads(part, self.heads) for part in mixed.split(self.sizes, -1))
        features = _FEATURES[self.feature_map]
        q, k = features(q), features(k)
        if self.normalize:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        else:
            q = q * self.key_dim**-0.5
        return Update(q, k.unsqueeze(3), v.unsqueeze(3), reset=span.reset, mask=span.mask), {"conv": window}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        if self.norm is None:
            return self.out((o[..., :-1] / (o[..., -1:] + self.eps)).flatten(-2))
        return self.out(self.norm(o))
