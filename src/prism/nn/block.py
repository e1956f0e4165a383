"""A layer of a model: norm and mixer, then norm and SwiGLU, each with a residual connection. The SwiGLU is optional."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from prism import rules
from prism.engine import compat, layer_step
from prism.engine.layer_ops import plain_linear, residual_norm, residual_sum, swiglu
from prism.engine.recompute import recomputing
from prism.engine.sequence_parallel import Context
from prism.engine.step_plan import GluPlan, Norm
from prism.nn.mixer import Mixer
from prism.nn.state import State

Summands = tuple[Tensor, Tensor]
"""Two tensors `[B, T, width]` that stand for their sum."""


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
        x: Tensor | Summands,
        state: State | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
        keep_state: bool = True,
        form: str = "auto",
        backend: str = "auto",
        context: Context | None = None,
        defer: bool = False,
    ) -> tuple[Tensor | Summands, State]:
        """x `[B, T, width]` → `[B, T, width]` and the mixer's state; arguments as in `Mixer.forward`.

        Args:
            x: may also be two summands, as `defer` returns them.
            keep_state: whether to return the state. If False the returned state is empty, so that unused tensors are not
                tracked (FSDP warns about conv states, which are views).
            defer: whether to return the output as two summands, so that the next layer sums them up together with its norm.
        """
        x, delta = (x, None) if isinstance(x, Tensor) else x
        if mask is None and reset is None and state is not None and context is None and delta is None:
            stepped = self._step(x, state, form, backend)
            if stepped is not None:
                return stepped if keep_state else (stepped[0], State())
        # What is recomputed contains the convolution, which would exchange its window again in the backward.
        with recomputing(self.recompute and context is None):
            x, y = residual_norm(x, delta, self.mixer_norm)
            mixed, state = self.mixer(y, state, mask, reset, form, backend, shared, context)
            mixed = self.dropout(mixed)
            if self.has_mlp:
                x, y = residual_norm(x, mixed, self.mlp_norm)
                mixed = self.dropout(self.mlp(y))
            return (x, mixed) if defer else residual_sum(x, mixed), state if keep_state else State()

    def _step(self, x: Tensor, state: State, form: str, backend: str) -> tuple[Tensor, State] | None:
        """One token per row in a few kernels, with the state after it; None if the ordinary forward pass must compute it."""
        if self.training or not layer_step.allowed(x, form, backend) or not _is_unmodified(self):
            return None
        plan, glu, norm = self.mixer.rule.current_step_plan(), self._glu_plan(), _norm_plan(self.mixer_norm)
        if plan is None or not plan.is_served or norm is None or (self.has_mlp and glu is None):
            return None
        weights = [*plan.weights, *(() if glu is None else glu[1:])]
        row = x.squeeze(1).contiguous()
        before = layer_step.DeltaState.of(row, plan, state.memory, state.carry)
        if before is None or not layer_step.uniform(row, *weights):
            return None
        if not all(p.is_contiguous() and p.device == x.device for p in self.parameters()):
            return None
        # A state that is not contiguous was copied, and the copy would be overwritten.
        overwrite = state.overwrite and all(z.is_contiguous() for z in state.tensors().values())
        row, after = layer_step.delta_step(row, norm, plan, before, overwrite)
        if glu is not None:
            row = layer_step.glu_step(row, glu)
        if overwrite:
            return row.unsqueeze(1), State(state.memory, dict(state.carry))
        return row.unsqueeze(1), State(after.memory, after.carry)

    def _glu_plan(self) -> GluPlan | None:
        if not self.has_mlp:
            return None
        norm, maps = _norm_plan(self.mlp_norm), (self.mlp.gate, self.mlp.up, self.mlp.down)
        if norm is None or type(self.mlp) is not SwiGLU or not all(map(plain_linear, maps)):
            return None
        return GluPlan(norm, *(m.weight for m in maps))


def may_defer(layers: Iterable[nn.Module]) -> bool:
    """Whether each of these blocks can leave its residual sum to the next one: in training, where no hook would see two
    summands."""
    layers = list(layers)
    plain = all(layer.training for layer in layers) and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return plain and all(map(compat.is_unmodified, layers))


def _norm_plan(norm: nn.Module) -> Norm | None:
    """The weight and epsilon of an RMSNorm; None if it is another module, or has no weight."""
    if type(norm) is not nn.RMSNorm or norm.weight is None or norm.eps is None:
        return None
    return Norm(norm.weight, norm.eps)


def _is_unmodified(block: Block) -> bool:
    """Whether every module inside would do nothing but its own forward pass: no hooks, nothing replaced on an instance."""
    hooked = compat.forward_hooks(())  # the global ones
    return not (hooked is None or any(hooked)) and all(m is block or compat.is_unmodified(m) for m in block.modules())


def place_options(rule: str | type[rules.Rule], index: int, count: int) -> dict[str, int]:
    """`layer_index` and `layer_count`, for rules that depend on the layer's position in the stack; {} for others."""
    accepted = rules.get(rule).option_names()
    return {name: value for name, value in {"layer_index": index, "layer_count": count}.items() if name in accepted}
