"""A layer of a model: norm and mixer, then norm and SwiGLU, each with a residual connection. The SwiGLU is optional."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prism import rules
from prism.engine.pieces import residual_norm, swiglu
from prism.engine.recompute import recomputing
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
        return swiglu(x, self.gate, self.up, self.down)


class Block(nn.Module):
    """x + mixer(norm x), then x + mlp(norm x).

    Args:
        rule, width, heads, options: as in `Mixer`.
        hidden: width of the SwiGLU; 0 omits it and its norm (in HSTU the gate replaces it).
        eps: epsilon of the norms.
        dropout: dropout probability of both residual branches.

    Attributes:
        recompute: whether training keeps no activation that is cheap to compute again (see prism/engine/recompute.py).
    """

    recompute = False

    def __init__(
        self,
        rule: str | type[rules.Rule],
        width: int,
        heads: int,
        hidden: int,
        eps: float = 1e-6,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(hidden, int) or hidden < 0:
            raise ValueError(f"hidden must be an integer ≥ 0 (0: no SwiGLU), got {hidden!r}")
        self.mixer_norm = nn.RMSNorm(width, eps=eps)
        self.mixer = Mixer(rule, width, heads, **options)
        if hidden:
            self.mlp_norm = nn.RMSNorm(width, eps=eps)
            self.mlp = SwiGLU(width, hidden)
        self.has_mlp = hidden > 0
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
        keep_state: bool = True,
        form: str = "auto",
        backend: str = "auto",
    ) -> tuple[Tensor, State]:
        """x `[B, T, width]` → `[B, T, width]` and the mixer's state; arguments as in `Mixer.forward`.

        Args:
            keep_state: whether to return the state. If False the returned state is empty, so that unused tensors are not
                tracked (FSDP warns about conv states, which are views).
        """
        with recomputing(self.recompute):
            x, y = residual_norm(x, None, self.mixer_norm)
            mixed, state = self.mixer(y, state, mask, reset, form, backend, shared)
            mixed = self.dropout(mixed)
            if self.has_mlp:
                x, y = residual_norm(x, mixed, self.mlp_norm)
                mixed = self.dropout(self.mlp(y))
            return x + mixed, state if keep_state else State()


def place_options(rule: str | type[rules.Rule], index: int, count: int) -> dict[str, int]:
    """`layer_index` and `layer_count`, for rules that depend on the layer's position in the stack; {} for others."""
    accepted = rules.get(rule).option_names()
    return {name: value for name, value in {"layer_index": index, "layer_count": count}.items() if name in accepted}
