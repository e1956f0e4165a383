"""RWKV's way to look one token back: every projection sees its own mixture of a token and the one before it.

    x_i = x_t + (x_{t-1} - x_t) ⊙ μ_i

RWKV-7 learns the μ_i; RWKV-6 adds to each a low-rank function of the input. Both start from a ramp over the channels,
1 - (c/D)^{p (1 - ℓ/Λ)}: early channels look back most, late layers less than early ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prism.rules.initial import set_initial_weights, uniform


def ramp(size: int) -> Tensor:
    """0 … 1 over `size` channels."""
    return torch.arange(size) / max(1, size - 1)


def mixtures(width: int, powers: list[float], layer_index: int, layer_count: int) -> Tensor:
    """The starting μ, one row for each power, `[n, D]`."""
    share = torch.arange(width) / width
    return torch.stack([1 - share ** (p * (1 - layer_index / layer_count)) for p in powers])


class TokenMix(nn.Module):
    """n learned mixtures of a token and its predecessor."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(count, width))  # the rule initialises it

    def forward(self, x: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
        """x and the tokens before `[B, T, D]` → n tensors of the same shape."""
        return _mix(x, previous - x, self.mu)


class DynamicTokenMix(TokenMix):
    """Mixtures that also depend on the token: μ_i + tanh(x_0 W)U_i, where x_0 is itself a learned mixture."""

    def __init__(self, count: int, width: int, rank: int) -> None:
        super().__init__(count, width)
        self.first = nn.Parameter(torch.empty(width))  # the mixture that is x_0; the rule initialises it
        self.down = nn.Linear(width, count * rank, bias=False)
        self.up = nn.Parameter(torch.empty(count, rank, width))
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        count, rank, width = self.up.shape
        return {"down.weight": torch.zeros(count * rank, width), "up": uniform((count, rank, width), 0.01)}

    def forward(self, x: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
        back = previous - x
        (own,) = _mix(x, back, self.first.unsqueeze(0))
        hidden = self.down(own).tanh().unflatten(-1, (len(self.mu), -1))
        return _mix(x, back, self.mu + torch.einsum("btnr,nrd->btnd", hidden, self.up.to(x.dtype)))


def _mix(x: Tensor, back: Tensor, mu: Tensor) -> tuple[Tensor, ...]:
    """x and the way back to its predecessor `[B, T, D]`, μ `[…, n, D]` → n tensors `[B, T, D]`, in x's precision."""
    return (x.unsqueeze(2) + back.unsqueeze(2) * mu.to(x.dtype)).unbind(2)
