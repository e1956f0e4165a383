"""Decoding into one state: tokens one after the other, each state where the one before it lay.

The decode kernel writes it there; where that does not serve an update (decays per channel, a CPU) it is computed and copied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prism.engine.autocast import without_autocast
from prism.engine.dispatch import engine_of, path_taken
from prism.engine.recurrent import recurrent
from prism.engine.update import Update, check_state, wants_gradients


def memory_(update: Update, state: Tensor, backend: str = "auto") -> Tensor:
    """`memory` in its recurrent form, for decode loops: overwrites `state` and returns the outputs `[B, T, H, V]`.

    Args:
        state: `[B, H, K, V]`, contiguous, float32 (float64 for float64 tokens). Afterwards the memory after the last token.
        backend: `"torch"`, `"triton"` or `"auto"`.

    It has no gradients of either mode: where one could be wanted it refuses, and `memory` has them.

    >>> import torch
    >>> q, k, w = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 1, 8), torch.randn(1, 1, 2, 1, 4)
    >>> state = torch.zeros(1, 2, 8, 4)
    >>> tuple(memory_(Update(q, k, w), state).shape), bool(state.any())
    ((1, 1, 2, 4), True)
    """
    if type(update) is not Update:
        raise ValueError(f"update must be an Update: a {type(update).__name__} has no state of one tensor")
    if not isinstance(state, Tensor):
        raise ValueError(f"state must be a tensor to be overwritten, got {type(state).__name__}")
    check_state(update, state)
    if state.dtype != update.state_dtype or not state.is_contiguous():
        strides = "" if state.is_contiguous() else f" with strides {list(state.stride())}"
        raise ValueError(f"state must be contiguous {update.state_dtype} to be overwritten, got {state.dtype}{strides}")
    if wants_gradients(*update.tensors, state):
        raise ValueError("memory_ has no gradients: call it under torch.no_grad(), or call memory")
    if path_taken(engine_of(Update), update, "recurrent", backend)[1] == "triton":
        from prism.engine.kernels import decode

        return decode.step_(*update.tensors, update.reset, update.mask, state, update.substeps)
    o, new = without_autocast(recurrent, update, state)
    state.copy_(new)
    return o


def replaces(update: Any, form: str) -> bool:
    """Whether `memory_` computes what `memory` would in this form, to the bit."""
    return type(update) is Update and (engine_of(Update).choose(update) if form == "auto" else form) == "recurrent"
