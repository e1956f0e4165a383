"""DeltaProduct: several steps of the delta rule for every token, each with its own key, value and step size.

    S ← α_t S_{t-1};   S ← (I - β_j k_j k_jᵀ) S + β_j k_j v_jᵀ   for j = 1 … n_h                  (Siems et al., 2025)

The memory is read after the last step. α = 1 without `forget_gate`. Queries, keys and values are made as in DeltaNet.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism.rules.delta import DeltaFamily, check_gate
from prism.rules.parts.decays import DRAWN
from prism.rules.rule import REPEATED_REGRESSION, Paper, check_integers, per_head


class DeltaProduct(DeltaFamily):
    """DeltaProduct: several delta steps for every token.

    A product of n_h Householder-like factors can rotate, which a single one cannot: the transition of a token differs from
    the decay by a matrix of rank up to n_h. β = 2σ by default, so that every factor can reflect; else as DeltaNet.

    Args:
        householders: n_h, the number of delta steps of a token; 1 is DeltaNet (with `forget_gate`: Gated DeltaNet).
        forget_gate: whether there is a decay α per head before the first step (Gated DeltaProduct).
        gate_by: of the output gate: `"silu"` as published, or `"sigmoid"`, which never changes the sign of what was read.
        timescales: with `forget_gate`, tokens in which untrained heads forget by a factor e: two numbers, between which
            heads are spread evenly in log, or `"drawn"`: at random, mostly from 1 to 100, as published.
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
        gate_by: str = "silu",
        negative_eigenvalues: bool = True,
        timescales: str | Sequence[float] = DRAWN,
        start: str = DRAWN,
    ) -> None:
        check_integers(householders=householders)
        check_gate(gate, gate_by)
        if timescales != DRAWN and not forget_gate:
            raise ValueError("timescales are those of the decay: set forget_gate=True, or omit them")
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            gate=gate,
            gate_by=gate_by,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
            forget_gate=forget_gate,
            timescales=timescales,
            start=start,
            substeps=householders,
        )
