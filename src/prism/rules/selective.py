"""Mamba-1 and Longhorn, selective state spaces: N numbers per channel, with decays that depend on the input.

    Mamba-1 (S6)   h_t[c,n] = exp(-Δ_t[c] e^{A[c,n]}) h_{t-1}[c,n] + Δ_t[c] B_t[n] x_t[c]              (Gu & Dao, 2023)
    Longhorn       h_t[c,n] = (1 - Δ_t[c] k_t[n]²) h_{t-1}[c,n] + Δ_t[c] k_t[n] x_t[c],  Δ = β/(1 + β kᵀk)  (Liu et al., 2024)

Longhorn is the implicit step on ‖S - S_{t-1}‖² + ‖Sᵀk - x‖²_β with the diagonal of kkᵀ in place of the full matrix: its decay
follows from what is written, without a forget gate. Neither decay is an outer product, so there is a scan but no chunk form.

Both have the same block around the memory: x comes from a short convolution with bias, y = Σ_n read_n h[c,n] + D x, and the
output is y times SiLU(z).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.memories.diagonal import Diagonal
from prism.rules.parts import Carry, ShortConv
from prism.rules.parts.decays import timescale_bias
from prism.rules.rule import Objective, Paper, Rule, Span, check_integers, set_initial_weights, uniform


class SelectiveFamily(Rule):
    """Base of Mamba-1 and Longhorn: the block around the memory.

    Defaults as published: 2 · width channels of N = 16 numbers. Heads have no meaning here.

    Args:
        key_dim: N, the state size of a channel.
        expand: number of channels, as a multiple of the width.
        rank: rank of the map to Δ; width / 16, rounded up, by default.
    """

    transition = "diagonal, not separable"
    forms = ("recurrent", "scan")
    shared_maps = ("out",)

    def __init__(
        self, width: int, heads: int, *, key_dim: int = 16, expand: int = 2, rank: int | None = None, conv_size: int = 4
    ) -> None:
        rank = math.ceil(width / 16) if rank is None else rank
        check_integers(expand=expand, rank=rank)
        inner = expand * width
        super().__init__(width, heads, key_dim, inner)
        self.state_size = inner * key_dim
        self.sizes = [rank, key_dim, key_dim]
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.conv = ShortConv(inner, conv_size, bias=True)
        self.select = nn.Linear(inner, sum(self.sizes), bias=False)
        self.step_in = nn.Linear(rank, inner, bias=False)
        self.step_bias = nn.Parameter(torch.empty(inner))
        self.skip = nn.Parameter(torch.empty(inner))
        self.out = nn.Linear(inner, width, bias=False)
        self.add_parameters()
        set_initial_weights(self)

    def add_parameters(self) -> None:
        """Hook for subclasses: create further parameters."""

    def initial_weights(self) -> dict[str, Tensor]:
        return {"step_bias": torch.zeros(self.value_dim), "skip": torch.ones(self.value_dim)}

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Diagonal, dict[str, Tensor], tuple[Tensor, Tensor]]:
        u, z = self.into(x).chunk(2, -1)
        u, conv_state = self.conv(u, carry.get("conv"), span)
        step, k, q = self.select(u).split(self.sizes, -1)
        step = self.step_in(step).to(self.step_bias.dtype) + self.step_bias
        return self.diagonal(u, step, k, q, span), {"conv": conv_state}, (u, z)

    def diagonal(self, u: Tensor, step: Tensor, k: Tensor, q: Tensor, span: Span) -> Diagonal:
        """The memory's update from u and the logits of Δ, each `[B, T, inner]`, and key k and query q, each `[B, T, N]`."""
        raise NotImplementedError

    def output(self, o: Tensor, x: Tensor, extra: tuple[Tensor, Tensor]) -> Tensor:
        u, z = extra
        return self.out((o.to(x.dtype) + self.skip.to(x.dtype) * u) * F.silu(z))


class Mamba1(SelectiveFamily):
    """Mamba-1 (S6): a decay from Δ and a learned A."""

    name = "mamba1"
    paper = Paper("Mamba", "Gu & Dao 2023", "https://arxiv.org/abs/2312.00752")
    objective = Objective("–")
    forgetting = "per channel and state"

    def add_parameters(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_dim, self.key_dim))

    def initial_weights(self) -> dict[str, Tensor]:
        rank = self.sizes[0]
        return {
            **super().initial_weights(),
            "A_log": torch.arange(1.0, self.key_dim + 1).log().expand(self.value_dim, -1),
            "step_in.weight": uniform((self.value_dim, rank), rank**-0.5),
            "step_bias": timescale_bias(self.value_dim),
        }

    def diagonal(self, u: Tensor, step: Tensor, k: Tensor, q: Tensor, span: Span) -> Diagonal:
        step = F.softplus(step)
        return Diagonal(
            write=((step * u).unsqueeze(-1), k.unsqueeze(2)),
            log_decay=(step.unsqueeze(-1), -self.A_log.exp()[None, None]),
            read=q.unsqueeze(2),
            reset=span.reset,
            mask=span.mask,
        )


class Longhorn(SelectiveFamily):
    """Longhorn: the decay follows from what is written."""

    name = "longhorn"
    paper = Paper("Longhorn", "Liu et al. 2024", "https://arxiv.org/abs/2407.14207")
    objective = Objective("implicit ½‖Sᵀk - x‖²")
    forgetting = "along the key, per channel and state"

    def diagonal(self, u: Tensor, step: Tensor, k: Tensor, q: Tensor, span: Span) -> Diagonal:
        k = k.to(step.dtype)
        beta = step.sigmoid()
        step = beta / (1 + beta * k.square().sum(-1, keepdim=True))
        return Diagonal(
            write=((step * u).unsqueeze(-1), k.unsqueeze(2)),
            forget=(step.unsqueeze(-1), k.square().unsqueeze(2)),
            read=q.unsqueeze(2),
            reset=span.reset,
            mask=span.mask,
        )
