"""`State`: what a mixer carries from one call to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.export
import torch.nn.functional as F
from torch import Tensor

_LINE = 80


@dataclass(frozen=True, repr=False)
class State:
    """A memory (a tensor, or tensors by name) and a carry (conv states, positions). Every tensor is `[B, …]`."""

    memory: Any = None
    carry: dict[str, Tensor] = field(default_factory=dict)
    overwrite: bool = False
    """Whether a step may update the memory in place. States derived from this one have False."""

    def __repr__(self) -> str:
        """Shapes instead of values, truncated to one line."""
        parts = [f"{name}={_shape(value)}" for name, value in self.tensors().items()]
        shown = [part for i, part in enumerate(parts) if len(", ".join(parts[: i + 1])) <= _LINE]
        if len(shown) < len(parts):
            shown.append(f"… {len(parts) - len(shown)} more")
        return f"State({', '.join(shown) or 'empty'}{', overwrite=True' if self.overwrite else ''})"

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by flat name, for saving as safetensors; `load` is the inverse."""
        named = {f"carry.{name}": value for name, value in self.carry.items()}
        if isinstance(self.memory, Tensor):
            return {"memory": self.memory, **named}
        return {**{f"memory.{name}": value for name, value in (self.memory or {}).items()}, **named}

    @classmethod
    def load(cls, tensors: dict[str, Tensor]) -> State:
        """The state with these tensors; the inverse of `tensors`."""
        for name in tensors:
            inside, whole = name.startswith(("memory.", "carry.")), name == "memory"
            if not (inside or whole) or ("memory" in tensors and name.startswith("memory.")):
                raise ValueError(
                    f"{name!r} is not a tensor of a State, which are named memory or memory.…, and carry.…: load what "
                    "`State.tensors` returned"
                )
        carry = {name[6:]: value for name, value in tensors.items() if name.startswith("carry.")}
        if "memory" in tensors:
            return cls(tensors["memory"], carry)
        memory = {name[7:]: value for name, value in tensors.items() if name.startswith("memory.")}
        return cls(memory or None, carry)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """A state with `function` applied to every tensor."""
        return State(_map(function, self.memory), _map(function, self.carry))

    def to(self, device: torch.device | str) -> State:
        """The state on another device; dtypes stay (a memory is float32 also in half-precision models)."""
        return self.map(lambda x: x.to(device))

    def index_select(self, rows: Tensor) -> State:
        """The states of these batch rows `[n]`, in this order (beam search, users)."""
        if not isinstance(rows, Tensor):
            raise ValueError(f"rows must be an integer tensor [n], got {type(rows).__name__}: pass torch.tensor(rows)")
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def detach(self) -> State:
        return self.map(lambda x: x.detach())


def _shape(x: Tensor) -> str:
    kind = "" if x.dtype == torch.float32 else f" {str(x.dtype).removeprefix('torch.')}"
    return f"{list(x.shape)}{kind}"


torch.export.register_dataclass(State, serialized_type_name="prism.nn.State")


def _map(function: Callable[[Tensor], Tensor], memory: Any) -> Any:
    """`function` of a tensor, or of each tensor by name; None stays None."""
    if isinstance(memory, dict):
        return {name: _map(function, part) for name, part in memory.items()}
    return None if memory is None else function(memory)


def concatenate(states: list[State]) -> State:
    """Join states along the batch; the inverse of `index_select`."""
    parts = [state.tensors() for state in states]
    return State.load({name: _join([part[name] for part in parts]) for name in parts[0]})


def _join(parts: list[Tensor]) -> Tensor:
    """Concatenate along the batch. Caches `[B, S, …]` of different lengths are padded at the front with empty slots."""
    if len({part.shape[1:] for part in parts}) > 1:
        longest = max(part.shape[1] for part in parts)
        parts = [F.pad(x, (*[0, 0] * (x.ndim - 2), longest - x.shape[1], 0)) for x in parts]
    return torch.cat(parts)
