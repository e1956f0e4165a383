"""Record the operations of torch that a function runs, as a tape.

What a function does may depend on the shapes of its inputs, not on their values: a function that looks at a value, draws a
random number or writes in place is refused. Tensors that do not depend on the inputs are constants, as they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prism.engine import compat
from prism.engine.inputs import without_value_checks

SHAPE_ONLY = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operations that read no value of their tensors: their results are constants."""


class CannotRecordError(Exception):
    """A function cannot be recorded: the message says why. (No RuntimeError, which callers may handle as their own.)"""


@dataclass(frozen=True)
class Entry:
    """One operation: its name, as in `mul.Tensor`, and the tensors of the recording.

    Args:
        call: computes it on other tensors.
        is_view: whether the outputs share the memory of an input.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    is_view: bool

    @property
    def inputs(self) -> list[Tensor]:
        return list(tensors_in((self.args, self.kwargs)))


@dataclass(frozen=True)
class Tape:
    """Operations in their order, from `inputs` to `outputs`; every other tensor is a constant."""

    inputs: tuple[Tensor, ...]
    entries: tuple[Entry, ...]
    outputs: tuple[Tensor, ...]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from tensors_in(part)
    elif isinstance(tree, dict):
        yield from tensors_in(tuple(tree.values()))


def replaced(tree: Any, values: dict[int, Tensor]) -> Any:
    """The tree with other tensors in place of those whose id is a key of `values`."""
    if isinstance(tree, Tensor):
        return values.get(id(tree), tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([replaced(part, values) for part in tree])
    if isinstance(tree, dict):
        return {name: replaced(part, values) for name, part in tree.items()}
    return tree


def record(function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Tape:
    """The tape of `function()`, which reads `inputs` and returns its outputs; CannotRecordError says why there is none."""
    base = compat.dispatch_mode()
    if base is None:
        raise CannotRecordError("this version of torch cannot record")
    entries: list[Entry] = []
    known = {id(x): x for x in inputs}  # keeps them alive: an id is never used twice

    def dispatch(self: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = op(*args, **kwargs)
        given = [x for x in tensors_in((args, kwargs)) if id(x) in known]
        name = f"{op.overloadpacket.__name__}.{op._overloadname}"
        _refuse(op, name, args, bool(given), found)
        results = tuple(x for x in tensors_in(found) if not any(x is y for y in given))
        if not given or not results or op.overloadpacket.__name__ in SHAPE_ONLY:
            return found
        addresses = {x.untyped_storage().data_ptr() for x in given}
        is_view = all(x.untyped_storage().data_ptr() in addresses for x in results)
        if len(results) < len(list(tensors_in(found))):
            raise CannotRecordError(f"{name} returns an input among other results")
        known.update({id(x): x for x in results})
        entries.append(Entry(name, op, args, kwargs, results, is_view))
        return found

    mode = type("Recording", (base,), {"__torch_dispatch__": dispatch})
    # In inference mode an operation that consists of others, such as a linear map, is seen as one.
    with torch.inference_mode(), without_value_checks(), mode():
        outputs = tuple(function())
    return Tape(tuple(inputs), tuple(entries), outputs)


def _without_dropout(name: str, args: Any) -> bool:
    """Whether an operation that can drop numbers at random drops none here."""
    if name == "dropout.default":
        return not args[1] or not args[2]
    return name == "scaled_dot_product_attention.default" and not any(args[4:5])


def _refuse(op: Any, name: str, args: Any, depends: bool, found: Any) -> None:
    """Refuse an operation that would not do the same in every call."""
    if torch.Tag.nondeterministic_seeded in op.tags and not _without_dropout(name, args):
        raise CannotRecordError(f"{name} draws random numbers")
    if not depends:
        return
    if op._schema.is_mutable:
        raise CannotRecordError(f"{name} writes in place")
    by_value = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags)
    if name == "index.Tensor" and not any(x.dtype == torch.bool for x in tensors_in(args[1])):
        by_value = set()  # places by number: as many as there are numbers
    if by_value or not all(isinstance(x, Tensor) for x in (found if isinstance(found, (list, tuple)) else [found])):
        raise CannotRecordError(f"{name} looks at a value")
