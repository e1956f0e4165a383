"""Keep no activation that a cheap function can compute again: `with recomputing(): … cheap(function, *inputs) …`.

Inside the block, what `cheap` returns, and what its own operations save, is not kept for the backward pass. In its place
stands the function with its inputs. The first operation of the backward pass that needs one of these tensors runs the function
again; the others find the result, and the last one drops it. Unlike `torch.utils.checkpoint`, this also holds for operations
after the function that save its results (a linear map saves its input, a memory its queries, keys and values), and they
themselves do not run twice. Values are the same to the bit, because the same function computes them from the same tensors.

The function must have no side effects and draw no random numbers. Outside of such a block, in compiled code and function
transforms, and where other saved-tensor hooks are active (gradient checkpointing, `save_on_cpu`), `cheap` just calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from prism.engine.compat import saved_tensor_hooks_active, transforms_active
from prism.engine.memory import resolve, using

Rest = TypeVar("Rest")
Function = Callable[..., tuple[tuple[Tensor, ...], Rest]]


class _Region:
    """The cheap functions of one block."""

    def __init__(self) -> None:
        self.results: dict[int, tuple[_Recipe, int]] = {}
        """By address of the storage: the recipe, and which of its results this is."""
        self.held: list[Any] = []
        """Those results, so that no other tensor gets their addresses while the block runs."""

    def pack(self, x: Tensor) -> Any:
        recipe, i = self.results.get(x.untyped_storage().data_ptr(), (None, 0)) if x.numel() else (None, 0)
        return x if recipe is None else _Result(recipe, i, x)

    def note(self, recipe: _Recipe, results: tuple[Tensor, ...]) -> None:
        for i, z in enumerate(results):
            self.results.setdefault(z.untyped_storage().data_ptr(), (recipe, i))
        self.held.append(results)


_active: ContextVar[_Region | None] = ContextVar("prism_recomputing", default=None)


def _region() -> _Region | None:
    """The block around this call; None if there is none, or nothing is recorded. Compiled code cannot read the variable."""
    return None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _active.get()


@contextmanager
def recomputing(wanted: bool = True) -> Iterator[None]:
    """Inside the block, results of `cheap` are computed again in the backward pass instead of being kept."""
    plain = not wanted or not torch.is_grad_enabled() or torch.compiler.is_compiling()
    if plain or saved_tensor_hooks_active() or transforms_active():
        yield
        return
    region = _Region()
    token = _active.set(region)
    try:
        with saved_tensors_hooks(region.pack, _unpack):
            yield
    finally:
        _active.reset(token)
        region.results.clear()  # torch keeps the hooks, and so the region, as long as the saved tensors
        region.held.clear()


def cheap(function: Function[Rest], *inputs: Tensor | None) -> tuple[tuple[Tensor, ...], Rest]:
    """function(*inputs): a tuple of tensors, which the block need not keep, and anything else, which is not recomputed."""
    region = _region()
    if region is None:
        return function(*inputs)
    recipe = _Recipe(function, inputs, region)
    results, rest = recipe.first(inputs, region)
    region.note(recipe, results)
    return results, rest


def replaceable(result: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`result`, which the block need not keep: it equals function(*inputs), whatever computed it."""
    region = _region()
    if region is not None:
        region.note(_Recipe(lambda *given: ((function(*given),), None), inputs, region, records=False), (result,))
    return result


class _Result:
    """Stands for a saved tensor that is a result of a recipe, or a view of one."""

    def __init__(self, recipe: _Recipe, i: int, x: Tensor) -> None:
        self.recipe, self.i = recipe, i
        self.view = x.size(), x.stride(), x.storage_offset()
        recipe.awaited[i] = recipe.awaited.get(i, 0) + 1

    def tensor(self) -> Tensor:
        return self.recipe.result(self.i).as_strided(*self.view)


class _Slot:
    """Stands for a tensor that an operation inside a recipe's function saved."""

    def __init__(self, recipe: _Recipe, number: int) -> None:
        self.recipe, self.number = recipe, number

    def tensor(self) -> Tensor:
        return self.recipe.inner(self.number)


def _unpack(kept: Any) -> Tensor:
    return kept.tensor() if isinstance(kept, (_Result, _Slot)) else kept


class _Recipe:
    """A function with its inputs, and what was computed again and is not read yet."""

    def __init__(
        self, function: Function[Any], inputs: tuple[Tensor | None, ...], region: _Region, records: bool = True
    ) -> None:
        self.function, self.records = function, records
        # A result of another recipe is not kept here either.
        self.inputs = [None if z is None else (region.pack(z.detach()), z.requires_grad) for z in inputs]
        self.given = _addresses(inputs)
        self.choice = resolve()
        self.autocast = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cuda", "cpu")
        }
        self.saved = 0
        self.slots: dict[int, Tensor] = {}
        self.results: dict[int, Tensor] = {}
        self.awaited: dict[int, int] = {}
        """How many saved tensors stand for each result and are not read yet."""

    def first(self, inputs: tuple[Tensor | None, ...], region: _Region) -> tuple[tuple[Tensor, ...], Any]:
        """Run the function for the first time. What it saves of its inputs is kept anyway."""

        def pack(x: Tensor) -> Any:
            self.saved += 1
            return region.pack(x) if x.untyped_storage().data_ptr() in self.given else _Slot(self, self.saved)

        with saved_tensors_hooks(pack, _unpack):
            return self.function(*inputs)

    def result(self, i: int) -> Tensor:
        if i not in self.results:
            self._again()
        self.awaited[i] -= 1
        # Below 0 in a second backward pass over the same graph: who still waits is not known then.
        return self.results[i] if self.awaited[i] > 0 else self.results.pop(i)

    def inner(self, number: int) -> Tensor:
        if number not in self.slots:
            self._again()
        return self.slots.pop(number)

    def _again(self) -> None:
        """Run the function once more. Its operations save the same tensors in the same order."""
        found: list[Tensor] = []
        inputs = [None if z is None else _unpack(z[0]).detach().requires_grad_(z[1]) for z in self.inputs]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.records))
            stack.enter_context(using(*self.choice))
            for device, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            stack.enter_context(saved_tensors_hooks(lambda x: found.append(x.detach()), _never))
            results, _ = self.function(*inputs)
        if len(found) != self.saved:
            raise RuntimeError(
                f"a function that is recomputed saved {self.saved} tensors at first and {len(found)} again: it must do the "
                "same in every call"
            )
        given, numbered = _addresses(inputs), enumerate(found, 1)
        self.slots = {number: x for number, x in numbered if x.untyped_storage().data_ptr() not in given}
        self.results = {i: z.detach() for i, z in enumerate(results)}


def _addresses(tensors: Iterable[Tensor | None]) -> set[int]:
    return {z.untyped_storage().data_ptr() for z in tensors if z is not None}


def _never(kept: Any) -> Tensor:
    raise RuntimeError("the backward pass of a recomputation is never run")
