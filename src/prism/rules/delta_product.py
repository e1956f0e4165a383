"""DeltaProduct: every token takes n_h delta steps instead of one, each with its own key, value and step size.

    S ← α_t S_{t-1};   S ← S(I - β_j k_j k_jᵀ) + β_j v_j k_jᵀ  for j = 1 … n_h;   read after the last      (Siems et al., 2025)

A product of n_h Householder-like factors can rotate, which a single one cannot: the transition of a token has rank up to
n_h beyond the decay. β = 2σ by default, so that every factor can reflect.
"""

from __future__ import annotations

from prism.rules.delta import DeltaFamily
from prism.rules.objectives import REPEATED_REGRESSION
from prism.rules.rule import Paper, check_whole, per_head


class DeltaProduct(DeltaFamily):
    """DeltaProduct: several delta steps for every token.

    Defaults as DeltaNet's, but two steps a token.

    Args:
        householders: n_h, the number of delta steps of a token; 1 is DeltaNet (with `forget_gate`: Gated DeltaNet).
        forget_gate: whether there is a decay α per head before the first step (Gated DeltaProduct).
    """

    name = "delta_product"
    paper = Paper("DeltaProduct", "Siems et al. 2025", "https://arxiv.org/abs/2502.10297")
    objective = REPEATED_REGRESSION
    forgetting = "along n keys, per head if gated"
    transition = "product of Householders"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        householders: int = 2,
        forget_gate: bool = False,
        conv_size: int = 4,
        gate: bool = False,
        negative_eigenvalues: bool = True,
    ) -> None:
        check_whole(householders=householders)
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            gate=gate,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            forget_gate=forget_gate,
            substeps=householders,
        )
