"""The weights a network memory starts every document with: parameters like any other, learned by the outer loop.

They count as gates: kept in float32 and not decayed, because they are a memory's state at its first token.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from prism.engine.networks import Network
from prism.rules.initial import set_initial_weights


class FastWeights(nn.Module):
    """W₀ and b₀ of a network with layers `sizes[0]` → … → `sizes[-1]` in every head.

    Args:
        heads: how many networks.
        sizes: of keys, hidden layers and values.
        bias: whether there are biases (they start at 0).
        norm: whether the answer goes through a LayerNorm with a scale and a shift per head.
        hidden_std: of W₀ in the layers before the last; 1/√(inputs) unless given. The last starts near zero, so that what a
            memory answers is what it has been told.
    """

    def __init__(
        self, heads: int, sizes: list[int], *, bias: bool = False, norm: bool = False, hidden_std: float | None = None
    ) -> None:
        super().__init__()
        layers = list(pairwise(sizes))
        self.stds = [fan_in**-0.5 if hidden_std is None else hidden_std for fan_in, _ in layers[:-1]] + [0.02]
        self.weights = nn.ParameterList(torch.empty(heads, fan_in, out) for fan_in, out in layers)
        self.biases = nn.ParameterList(torch.empty(heads, out) for _, out in layers) if bias else None
        self.scale = nn.Parameter(torch.empty(heads, sizes[-1])) if norm else None
        self.shift = nn.Parameter(torch.empty(heads, sizes[-1])) if norm else None
        self.size = heads * sum(out * (fan_in + bias) for fan_in, out in layers)
        """Numbers that the inner loop changes."""
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        values = {f"weights.{i}": self.stds[i] * torch.randn(w.shape) for i, w in enumerate(self.weights)}
        values |= {f"biases.{i}": torch.zeros(b.shape) for i, b in enumerate(self.biases or ())}
        if self.scale is not None and self.shift is not None:
            values |= {"scale": torch.ones(self.scale.shape), "shift": torch.zeros(self.shift.shape)}
        return values

    def network(self, residual: bool = False, loss_scale: float = 0.5) -> Network:
        return Network(
            tuple(self.weights),
            None if self.biases is None else tuple(self.biases),
            None if self.scale is None or self.shift is None else (self.scale, self.shift),
            residual,
            loss_scale,
        )
