"""Initial weights: a rule or a part that sets weights itself returns them from `initial_weights`.

All other weights of linear maps are left to torch in a `Mixer`, and to the configuration (`initializer_range`) in a model. A
model draws its weights after it was built, perhaps on the meta device or sharded: so values are returned, not written.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class SetsWeights(Protocol):
    """A module with weights of its own."""

    def initial_weights(self) -> dict[str, Tensor]:
        """Newly drawn values by parameter name, on the current default device."""
        ...

    def get_parameter(self, target: str) -> nn.Parameter: ...


@torch.no_grad()
def set_initial_weights(part: SetsWeights) -> None:
    """Give a part the weights that it sets itself. Constructors call this once those parameters exist."""
    for name, value in part.initial_weights().items():
        part.get_parameter(name).copy_(value)


def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
    """Drawn from U(-bound, bound)."""
    return torch.empty(shape).uniform_(-bound, bound)
