"""The delta family: a key first takes back what the memory answers it with, then writes the new value.

    DeltaNet         S_t = S_{t-1}(I - β k kᵀ) + β v kᵀ                            (Schlag 2021, Yang 2024)

One gradient step of size β on ½‖Sk - v‖²; the family's other members let the memory decay first. Queries and keys go through
a short convolution, SiLU and L2 normalisation, so the eigenvalue along k is 1 - β: in [0, 1], or with `negative_eigenvalues`
(β = 2σ) in [-1, 1].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import Update
from prism.engine.fused import Corrections, delta_columns
from prism.rules.decays import SoftplusDecay
from prism.rules.norms import HeadNorm
from prism.rules.objectives import REGRESSION
from prism.rules.parts import Carry, ShortConv, linears
from prism.rules.rule import Rule, per_head
from prism.rules.span import Span


class DeltaFamily(Rule):
    """Shared by all rules that erase along the key they write, after no decay, one per head (`forget_gate`) or their own."""

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        gate: bool,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        forget_gate: bool = False,
        substeps: int = 1,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, write_rank=substeps)
        self.substeps = substeps
        self.beta_scale = 2.0 if negative_eigenvalues else 1.0
        keys, values = heads * key_dim, heads * value_dim
        self.sizes = [keys, substeps * keys, substeps * values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size)
        self.beta = nn.Linear(width, substeps * heads, bias=False)
        self.norm = HeadNorm(value_dim)
        self.gate: nn.Module | None = nn.Linear(width, values, bias=False) if gate else None
        self.out = nn.Linear(values, width, bias=False)
        self.decay_in: nn.Module | None = nn.Linear(width, heads, bias=False) if forget_gate else None
        self.decay: SoftplusDecay | None = SoftplusDecay(heads) if forget_gate else None

    def beta_and_decay(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """β `[B, T·n, H]` and the log-decay, `[B, T, H]`, `[B, T, H, K]` or None."""
        maps = [self.beta] if self.decay_in is None else [self.beta, self.decay_in]
        beta, *decay = linears(x, *maps)
        beta = beta.unflatten(-1, (self.substeps, self.heads)).flatten(1, 2)  # [B, T, n·H] -> [B, T·n, H]
        return self.beta_scale * beta.sigmoid(), None if self.decay is None else self.decay(decay[0])

    def corrections(self, x: Tensor, carry: Carry, span: Span) -> tuple[Corrections | None, dict[str, Tensor]]:
        """Writes that follow a token's first, and what they carry on: PRISM's own."""
        return None, {}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Update, dict[str, Tensor], None]:
        mixed, window = self.conv(self.qkv(x), carry.get("conv"), span)
        beta, log_decay = self.beta_and_decay(x)
        corrections, carried = self.corrections(x, carry, span)
        update = Update(
            *delta_columns(mixed, beta, self.key_dim, self.substeps, corrections),
            log_decay,
            erase_strength=beta,
            erase_first=True,
            reset=span.reset,
            mask=span.mask,
            substeps=self.substeps,
        )
        return update, {"conv": window, **carried}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o, None if self.gate is None else F.silu(self.gate(x))))


class Delta(DeltaFamily):
    name = "delta"
    objective = REGRESSION
    forgetting = "along the key"
    transition = "Householder"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        gate: bool = False,
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__(
            width,
            heads,
            per_head(width, heads, key_dim),
            per_head(width, heads, value_dim),
            gate=gate,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
        )
