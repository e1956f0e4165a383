"""A layer of a model: norm, mixer, norm, SwiGLU, each pair added to what went in."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from prism import rules
from prism.nn.mixer import Mixer
from prism.nn.state import State


class SwiGLU(nn.Module):
    """`[…, width]` → `[…, width]`: down(SiLU(gate x) ⊙ up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + mixer(norm x), then x + mlp(norm x).

    Args:
        rule, width, heads, options: as in `Mixer`.
        hidden: width of the SwiGLU.
        eps: of the norms.
    """

    def __init__(self, rule: str, width: int, heads: int, hidden: int, eps: float = 1e-6, **options: Any) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(width, eps=eps)
        self.mixer = Mixer(rule, width, heads, **options)
        self.mlp_norm = nn.RMSNorm(width, eps=eps)
        self.mlp = SwiGLU(width, hidden)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """`[B, T, width]` → `[B, T, width]` and the mixer's state, all as in `Mixer.forward`."""
        mixed, state = self.mixer(self.mixer_norm(x), state, mask, reset, shared=shared)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


def place_options(rule: str, index: int, count: int) -> dict[str, int]:
    """`layer_index` and `layer_count`, for rules whose initialisation depends on where in the stack they stand."""
    accepted = rules.get(rule).option_names()
    return {name: value for name, value in {"layer_index": index, "layer_count": count}.items() if name in accepted}
