"""Several memories a row, side by side in the batch (a mixture of memories).

The wrapped update has batch B·M: row b·M + m is memory m of sequence b. Whatever computes that update computes this one; only
the state is handed on with the batch first, a dict of tensors `[B, M, …]`, so that rows of a batch can be picked and joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from prism.engine.dispatch import memory

_ALONE = "memories"
"""The name of a state that has none."""


@dataclass(frozen=True, eq=False)
class Folded:
    """Args:
    update: of any type, its batch B·M.
    memories: M.
    """

    update: Any
    memories: int

    def __post_init__(self) -> None:
        if not isinstance(self.memories, int) or self.memories < 1:
            raise ValueError(f"memories must be a whole number ≥ 1, got {self.memories!r}")

    @property
    def tokens(self) -> int:
        return self.update.tokens


def fold(x: Tensor) -> Tensor:
    """`[B, M, …]` → `[B·M, …]`."""
    return x.flatten(0, 1)


def unfold(x: Tensor, memories: int) -> Tensor:
    """`[B·M, …]` → `[B, M, …]`."""
    return x.unflatten(0, (-1, memories))


def delegate(update: Folded, state: Any, form: str, backend: str) -> tuple[Any, Any]:
    """Outputs stay folded, `[B·M, T, …]`."""
    inner: Any = None if state is None else {name: fold(x) for name, x in state.items()}
    if inner is not None and _ALONE in inner:
        inner = inner[_ALONE]
    o, new = memory(update.update, inner, form, backend)
    named = {_ALONE: new} if isinstance(new, Tensor) else new
    return o, {name: unfold(x, update.memories) for name, x in named.items()}


def check_state(update: Folded, state: Any) -> None:
    """Shapes are checked by the wrapped update's engine."""
    if state is not None and not (isinstance(state, dict) and all(isinstance(x, Tensor) for x in state.values())):
        raise ValueError("state of a Folded must be a dict of tensors [B, M, …], as `memory` returned it")
    for name, x in (state or {}).items():
        if x.shape[1:2] != (update.memories,):
            raise ValueError(f"state {name!r} has shape {list(x.shape)}, expected [B, M, …] with M = {update.memories}")
