"""Comba: a delta rule that erases a learned share of what it reads, and corrects the query by the key.

    S_t = α_t S_{t-1} - β b k (kᵀ S_{t-1}) + β k vᵀ                                            (Hu et al., 2025)
    o_t = S_tᵀ q'_t                                      q' = nrm(q - D b k)

b = σ(d) and D are one learned number per head each. Two differences from Gated DeltaNet, α (I - β k kᵀ) S + β k vᵀ: the erase
reads the *undecayed* state, so the transition is a scalar plus a matrix of rank 1, and its strength β b is below that of
the write, β. The query is corrected before both are normalised.

flash-linear-attention's kernels and its chunked reference read the undecayed state too; its naive loop decays first. Its
layer normalises b k together with q and k, which makes b act on the query only. Here b acts on both, as published.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.layer_ops import delta_columns
from prism.rules.delta import DeltaFamily
from prism.rules.parts import Carry
from prism.rules.rule import (
    GENERALISED_REGRESSION,
    Paper,
    Span,
    check_nonnegative,
    per_head,
    set_initial_weights,
)


class Comba(DeltaFamily):
    """Comba: a delta rule with a weaker erase of the undecayed state, and a query corrected by the key.

    Defaults as published: H·K = ¾ width and V = 2K (6 heads of 256 × 512 at width 2048). The output gate is a sigmoid.

    Args:
        key_dim: size of a head's queries and keys; ¾ · width / heads by default.
        value_dim: size of a head's values; 2 · key_dim by default.
        correction: initial value of D. Its authors advise to try 0.02 for small models.
    """

    name = "comba"
    paper = Paper("Comba", "Hu et al. 2025", "https://arxiv.org/abs/2506.02475")
    objective = GENERALISED_REGRESSION
    forgetting = "per head, and along the key"
    transition = "α + rank 1"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        gate: bool = True,
        correction: float = 1.0,
    ) -> None:
        check_nonnegative(correction=correction)
        key_dim = per_head(width, heads, key_dim, ratio=0.75)
        super().__init__(
            width,
            heads,
            key_dim,
            2 * key_dim if value_dim is None else value_dim,
            gate=gate,
            gate_by="sigmoid",
            conv_size=conv_size,
            forget_gate=True,
        )
        self.first_correction = correction
        self.share = nn.Parameter(torch.empty(heads))
        self.correction = nn.Parameter(torch.empty(heads))
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        correction = torch.full((self.heads,), self.first_correction)
        return {"share": torch.ones(self.heads), "correction": correction}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        mixed, conv_state = self.conv(self.qkv(x), carry.get("conv"), span)
        beta, log_decay = self.beta_and_decay(x)
        share = self.share.sigmoid()
        update = Update(
            *delta_columns(self._corrected(mixed, self.correction * share), beta, self.key_dim),
            log_decay,
            erase_strength=beta * share.to(beta.dtype),
            erase_first=True,
            erase_on="undecayed",
            reset=span.reset,
            mask=span.mask,
        )
        return update, {"conv": conv_state}, None

    def _corrected(self, mixed: Tensor, factor: Tensor) -> Tensor:
        """q̃, k̃ and v `[B, T, H·K + H·K + H·V]` with q̃ - factor · k̃ in place of q̃; `factor` `[H]`."""
        q, k, v = mixed.split(self.sizes, -1)
        return torch.cat([q - factor.to(q.dtype).repeat_interleave(self.key_dim) * k, k, v], -1)
