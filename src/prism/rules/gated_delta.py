"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024): DeltaNet after a decay that the input chooses, one per head.

S_t = α_t S_{t-1}(I - β k kᵀ) + β v kᵀ
"""

from __future__ import annotations

from prism.rules.delta import DeltaFamily
from prism.rules.objectives import DECAYED_REGRESSION
from prism.rules.rule import Paper, per_head


class GatedDelta(DeltaFamily):
    """Gated DeltaNet: the delta rule after a decay per head.

    Defaults as published: H·K = ¾ width and V = 2K (6 heads of 256 × 512 at width 2048).

    Args:
        key_dim: size of a head's queries and keys; ¾ · width / heads by default.
        value_dim: size of a head's values; 2 · key_dim by default.
    """

    name = "gated_delta"
    paper = Paper("Gated Delta Networks", "Yang et al. 2024", "https://arxiv.org/abs/2412.06464")
    objective = DECAYED_REGRESSION
    forgetting = "per head, and along the key"
    transition = "α · Householder"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        gate: bool = True,
        negative_eigenvalues: bool = False,
    ) -> None:
        key_dim = per_head(width, heads, key_dim, ratio=0.75)
        super().__init__(
            width,
            heads,
            key_dim,
            2 * key_dim if value_dim is None else value_dim,
            gate=gate,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            forget_gate=True,
        )
