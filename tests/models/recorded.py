"""A CUDA graph's stand-in on a CPU: what was computed once is computed again from the same memory into the same memory.

Like a graph it does not look at the model again, so that a test sees what would be out of date.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from prism.models.replay import CapturedStep


class Recorder(TorchDispatchMode):
    """Keeps every operation with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = operation(*arguments, **(named or {}))
        self.calls.append((operation, arguments, named or {}, result))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for operation, arguments, named, result in self.calls:
                bases = {_storage(z) for z in pytree.tree_leaves((arguments, named)) if isinstance(z, Tensor)}
                again = operation(*arguments, **named)
                for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and _storage(old) not in bases:  # a view sees what its base has become
                        old.copy_(new)


def _storage(z: Tensor) -> int:
    return z.untyped_storage().data_ptr()


def record(step: CapturedStep) -> bool:
    """In place of `captured.record`."""
    if not step.has_fixed_layout():
        return False
    before = [state.map(torch.clone) for state in step.states]
    recorder = Recorder()
    with recorder:
        step.run()
    for state, old in zip(step.states, before, strict=True):  # recording runs nothing
        for name, value in state.tensors().items():
            value.copy_(old.tensors()[name])
    step.replay = recorder.replay
    return True
