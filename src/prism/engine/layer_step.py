"""One token per row through a layer in seven kernels.

    1  norm, PRISM's anchor                                                                          token_maps.py
    2  all projections of the input, convolution window, first halves of PRISM's low-rank maps       token_maps.py
    3  second halves, norms, gates, solver, memory, gated norm of the output                         token_memory.py
    4  output projection, residual                                                                   token_maps.py
    5  norm                                                                                          token_maps.py
    6  gate and up projections, SiLU                                                                 token_maps.py
    7  down projection, residual                                                                     token_maps.py

A rule that can be computed so returns a *plan*: its weights by role, as they are now. Nothing is prepared or kept between
steps, so weights may change at any time. The definition is the layer's ordinary forward pass: that is what runs where a plan
does not serve (a CPU, gradients, autocast, padding, several tokens), with the same states.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.kernels import available
from prism.engine.layer_ops import UNIT_EPS
from prism.engine.memory import resolve
from prism.engine.step_plan import DeltaPlan, GluPlan, Norm

STATE_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes in which a step reads and writes a memory."""


def allowed(x: Tensor, form: str, backend: str) -> bool:
    """Whether one token per row, x `[B, 1, D]`, may be computed here: an eager call without gradients, on a GPU.

    `backend="triton"` also allows Triton's interpreter on a CPU.
    """
    form, backend = resolve(form, backend)
    if x.ndim != 3 or x.shape[1] != 1 or form not in ("auto", "recurrent") or backend not in ("auto", "triton"):
        return False
    if not x.is_cuda and (backend == "auto" or x.dtype == torch.bfloat16):  # which the interpreter multiplies wrongly
        return False
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or type(x) is not Tensor:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return False
    if compat.in_dispatch_mode() or compat.transforms_active(x) or os.environ.get("PRISM_CHECK") == "1":
        return False
    return available.device_refuses(x) is None


def uniform(x: Tensor, *weights: Tensor) -> bool:
    """Whether all weights are contiguous, and of x's dtype and device."""
    return all(w.dtype == x.dtype and w.device == x.device and w.is_contiguous() for w in weights)


class DeltaState(NamedTuple):
    """What a layer of the delta family carries from token to token."""

    memory: Tensor  # [B, H, K, V]
    conv: Tensor | None  # [B, W - 1, …]; None: no convolution
    anchor: Tensor | None  # [B, W - 1, D]; None: no convolution, or no later writes

    @classmethod
    def of(cls, x: Tensor, plan: DeltaPlan, memory: object, carry: Mapping[str, Tensor]) -> DeltaState | None:
        """These tensors if they are a state of the plan's layer for x `[B, D]`; otherwise None."""
        rows = x.shape[0]
        windows = {"conv": plan.taps, "anchor": None if plan.writes is None else plan.writes.taps}
        expected = {
            name: (rows, taps.shape[0] - 1, taps.shape[1]) for name, taps in windows.items() if taps is not None
        }
        if {name: tuple(window.shape) for name, window in carry.items()} != expected:
            return None
        if not isinstance(memory, Tensor) or memory.shape != (rows, plan.heads, plan.key_dim, plan.value_dim):
            return None
        if memory.dtype not in STATE_DTYPES or any(z.device != x.device for z in (memory, *carry.values())):
            return None
        if any(window.dtype != x.dtype for window in carry.values()):
            return None
        return cls(memory.contiguous(), *(carry[name].contiguous() if name in carry else None for name in windows))

    @property
    def carry(self) -> dict[str, Tensor]:
        named = {"conv": self.conv, "anchor": self.anchor}
        return {name: window for name, window in named.items() if window is not None}

    def like(self) -> DeltaState:
        """New memory for a state of the same sizes."""
        return DeltaState(*(None if z is None else torch.empty_like(z) for z in self))  # type: ignore[arg-type]


def delta_step(x: Tensor, norm: Norm, plan: DeltaPlan, state: DeltaState, overwrite: bool) -> tuple[Tensor, DeltaState]:
    """x + mixer(norm x) for x `[B, D]`, and the state after this token, which is `state` itself if it may be overwritten."""
    from prism.engine.kernels.token_maps import Window, maps, normed
    from prism.engine.kernels.token_memory import Places, delta_token

    new, writes = state if overwrite else state.like(), plan.writes
    anchor = None if writes is None else Window(writes.taps, state.anchor, new.anchor)
    n, u = normed(x, norm, anchor)
    inputs = plan.inputs
    of_u = [] if writes is None else [*(m.down for m in writes.maps), writes.beta]
    given = maps(n, inputs, u, of_u, window=Window(plan.taps, state.conv, new.conv))
    at_decay = inputs[0].shape[0] + inputs[1].shape[0]
    at_low = sum(weight.shape[0] for weight in inputs)
    at_gate = at_low if plan.gate is None else at_low - inputs[-1].shape[0]
    places = Places(inputs[0].shape[0], at_decay, at_gate, at_low)
    mixed = delta_token(given, places, plan, UNIT_EPS, state.memory, new.memory)
    return maps(mixed, [plan.out], residual=x), new


def glu_step(x: Tensor, plan: GluPlan) -> Tensor:
    """x + down(SiLU(gate n) ⊙ up n) for n = norm x, x `[B, D]`."""
    from prism.engine.kernels.token_maps import gated, maps, normed

    return maps(gated(normed(x, plan.norm)[0], plan.gate, plan.up), [plan.down], residual=x)
