"""Several memories per sequence, folded into the batch (a mixture of memories).

The wrapped update has batch B·M: row b·M + m is memory m of sequence b. The engine of that update computes this one. Only
the state differs: a dict of tensors `[B, M, …]`, batch first, so that rows of a batch can be selected and concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from prism.engine.inputs import check_integer
from prism.engine.memory import memory

_ALONE = "memories"
"""Key for a state that is one tensor."""


@dataclass(frozen=True, eq=False)
class Folded:
    """M memories per sequence.

    Args:
        update: of any type, with batch B·M.
        memories: M.
    """

    update: Any
    memories: int

    def __post_init__(self) -> None:
        check_integer("memories", self.memories)

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
    """Compute the wrapped update. Outputs stay folded, `[B·M, T, …]`."""
    inner: Any = None if state is None else {name: fold(x) for name, x in state.items()}
    if inner is not None and _ALONE in inner:
        inner = inner[_ALONE]
    o, new = memory(update.update, inner, form, backend)
    named = {_ALONE: new} if isinstance(new, Tensor) else new
    return o, {name: unfold(x, update.memories) for name, x in named.items()}


def check_state(update: Folded, state: Any) -> None:
    """A state must be a dict of tensors `[B, M, …]`; the wrapped update's engine checks the other dimensions."""
    if state is not None and not (isinstance(state, dict) and all(isinstance(x, Tensor) for x in state.values())):
        raise ValueError("state of a Folded must be a dict of tensors [B, M, …], as `memory` returned it")
    for name, x in (state or {}).items():
        if x.shape[1:2] != (update.memories,):
            raise ValueError(f"state {name!r} has shape {list(x.shape)}, expected [B, M, …] with M = {update.memories}")
