"""Updates and tile sizes for the tests of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

import prism
from prism.engine.kernels.memory.configurations import Configuration, Tiling
from prism.rules.parts import l2_normalize
from tests.engine.kernels.where import DEVICE

SMALLEST = 16 if DEVICE == "cpu" else 32
"""The side of the smallest tile that was checked on this device."""


def tiles(step: int, chunk: int, segments: int | None = None) -> Configuration:
    """A configuration with the smallest tiles."""
    small = Tiling(SMALLEST)
    return Configuration(small, small, small, small, step=step, chunk=chunk, key_block=SMALLEST, segments=segments)


def leaves(T: int, H: int = 2, G: int = 2, K: int = 16, V: int = 16, L: int = 2, n: int = 1, dtype=torch.float64):
    """The tensors of a gated delta update with L writes and n sub-steps, and a state, all of which want gradients."""
    draw = {
        "q": l2_normalize(torch.randn(1, T, G, K)),
        "k": l2_normalize(torch.randn(1, T * n, G, L, K)),
        "w": torch.randn(1, T * n, H, L, V),
        "log_decay": -0.2 * torch.rand(1, T, H),
        "erase_strength": torch.rand(1, T * n, H),
        "state": torch.randn(1, H, K, V),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in draw.items()}


def update(x: dict[str, Tensor], **more) -> prism.Update:
    """The update of `leaves`, which erases along the first key."""
    return prism.Update(**{name: z for name, z in x.items() if name != "state"}, erase_first=True, **more)
