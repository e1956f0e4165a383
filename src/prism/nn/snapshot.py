"""`Snapshot`: notice that a module has changed. `Kept`: keep what was computed from a module for as long as it has not.

What is computed once from a module's weights, or captured as a graph, does not look at the module again. A change is a
parameter, buffer or submodule replaced, moved or, if it matters, written in place; a hook; another class, mode or `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from prism.engine import compat

T = TypeVar("T")


class Snapshot:
    """What a module, with all modules inside it, computes with at this moment.

    Args:
        in_place: whether a weight that is written in place counts as a change, and a module that is added does not: for what
            was computed from weights, in contrast to what was captured.
    """

    def __init__(self, module: nn.Module, in_place: bool) -> None:
        self.modules = modules = list(module.modules())
        registries, hooks = compat.registries(modules), compat.forward_hooks(modules)
        self.complete = registries is not None and hooks is not None
        """Whether changes can be noticed at all: torch's registries were found."""
        self.registries, self.hooks = registries or [], hooks or []
        entries = [(registry, name, value) for registry in self.registries for name, value in registry.items()]
        self.holders, self.names = [entry[0] for entry in entries], [entry[1] for entry in entries]
        self.contents = [entry[2] for entry in entries]
        self.attributes = [m.__dict__ for m in modules]
        self.weights = [*module.parameters(), *module.buffers()]
        self.in_place = in_place and not any(w.is_inference() for w in self.weights)  # those have no version
        self.hooked = any(self.hooks)
        self.found = self._kinds(), self._weights()

    def holds(self) -> bool:
        """Whether nothing has changed."""
        if not self.hooked and any(self.hooks):
            return False
        if not all(map(is_, map(dict.get, self.holders, self.names), self.contents)):
            return False
        return (self._kinds(), self._weights()) == self.found

    # Called before every token, so without loops in Python.
    def _kinds(self) -> list[Any]:
        """Of every module: mode, an overridden `forward` (by accelerate), class, number of entries, whether it has hooks."""
        modes = map(dict.get, self.attributes, repeat("training"))
        forwards = map(dict.get, self.attributes, repeat("forward"))
        added = () if self.in_place else map(len, self.registries)  # an added module is not in what was merged
        return [*modes, *forwards, *map(type, self.modules), *added, *self._hooks()]

    def _hooks(self) -> list[bool]:
        return list(map(bool, self.hooks)) if self.hooked else []

    def _weights(self) -> list[Any]:
        versions = map(attrgetter("_version"), self.weights) if self.in_place else ()
        return [*map(Tensor.data_ptr, self.weights), *map(Tensor.numel, self.weights), *versions]


class Kept(Generic[T]):
    """A value that was computed from a module. It is not copied or pickled with the module."""

    def __init__(self) -> None:
        self._kept: tuple[Snapshot, T] | None = None

    def get(self, module: nn.Module, compute: Callable[[], T]) -> T:
        """The value, computed again if the module has changed."""
        kept = self._kept
        if kept is None or not kept[0].holds():
            snapshot = Snapshot(module, in_place=True)
            with torch.inference_mode(False), torch.no_grad():  # it may be used in any mode
                kept = snapshot, compute()
            self._kept = kept if snapshot.complete else None
        return kept[1]

    def drop(self) -> None:
        self._kept = None

    def __reduce__(self) -> tuple[type[Kept[T]], tuple[()]]:
        return Kept, ()
