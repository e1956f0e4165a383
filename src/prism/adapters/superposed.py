"""A memory that is the sum of the base layer's and of each adapter's: one output, a state for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from prism.engine import Update, memory
from prism.engine.dispatch import Engine, register

BASE = "base"
_ADAPTER = "adapter."


@dataclass(frozen=True, eq=False)
class Superposed:
    """The base layer's update, and those of the active adapters by name."""

    base: Update
    branches: dict[str, Update] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.base.tokens


def check_state(update: Superposed, state: Any) -> None:
    """A state must be the base layer's tensor, or a dict of it and the adapters'."""
    if isinstance(state, dict) and BASE not in state:
        raise ValueError(f"state must hold the memory {BASE!r} of the base layer, got {', '.join(state) or 'nothing'}")


def delegate(update: Superposed, state: Any, form: str, backend: str) -> tuple[Tensor, Any]:
    """The sum of all outputs, and the states of those that computed it.

    An adapter that is not active loses its state, since it would miss this call's tokens: it starts again with an empty one.
    """
    before = state if isinstance(state, dict) else {BASE: state}
    o, new = memory(update.base, before[BASE], form, backend)
    after = {BASE: new}
    for name, branch in update.branches.items():
        added, after[_ADAPTER + name] = memory(branch, before.get(_ADAPTER + name), form, backend)
        o = o + added.to(o.dtype)
    return o, after if update.branches else new


register(Superposed, Engine(paths={}, choose=lambda update: "auto", check_state=check_state, delegate=delegate))
