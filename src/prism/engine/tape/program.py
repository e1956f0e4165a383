"""A tape with fixed buffers: a list of calls that reads its inputs' buffers and writes its outputs'.

Design choices
- Views are made once: the buffer they look into stays where it is.
- Linear maps of one input are one product, if their weights are constants. A map to more outputs than inputs is multiplied
  with its weight transposed in memory, which a CPU reads up to three times as fast.
- These prepared weights are shared by all programs of a model. Beyond `LIMIT` bytes, weights are used where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from prism.engine.tape.calls import Call, calls_of, copy
from prism.engine.tape.record import Entry, Tape, replaced

LIMIT = 2**30
"""Bytes of prepared weights per model."""
SMALL = 2**16
"""Numbers up to which weights are joined only to save a product."""
WIDE = 1.5
"""Outputs per input from which a weight is transposed in memory."""


class PreparedWeights:
    """Copies of constant weights in the layout in which they are multiplied."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}
        self.nbytes = 0

    def joined(self, weights: list[Tensor]) -> Tensor | None:
        """Weights `[N_i, D]` as one `[D, ΣN_i]`; None if they are better used one by one."""
        key = tuple(map(id, weights))
        if key in self.kept:
            return self.kept[key][1]
        outputs, inputs = sum(len(w) for w in weights), weights[0].shape[1]
        size = outputs * inputs
        wide = outputs >= WIDE * inputs
        nbytes = size * weights[0].element_size()
        if self.nbytes + nbytes > LIMIT or not (wide or (len(weights) > 1 and size <= SMALL)):
            return None
        together = torch.cat([w.detach() for w in weights])
        prepared = together.t().contiguous() if wide else together.t()
        self.kept[key] = weights, prepared  # holding the weights keeps their ids
        self.nbytes += nbytes
        return prepared


class Program:
    """The calls that replay a tape.

    Args:
        tape: from `record`, perhaps `shortened`.
        inputs: buffers with the shapes of the tape's inputs.
        outputs: buffers for its outputs, each written when its value is known: none may be an input's buffer.
        weights: prepared weights, shared with other programs of the same constants.
    """

    def __init__(
        self, tape: Tape, inputs: Sequence[Tensor], outputs: Sequence[Tensor], weights: PreparedWeights
    ) -> None:
        self.calls: list[Call] = []
        self.weights = weights
        self.values = {id(old): new for old, new in zip(tape.inputs, inputs, strict=True)}
        self.variable = set(self.values) | {id(x) for entry in tape.entries for x in entry.outputs}
        self.groups = self._groups_of_maps(tape)
        self.places = {id(old): new for old, new in zip(tape.outputs, outputs, strict=True)}
        with torch.inference_mode():
            for entry in tape.entries:
                if any(id(x) not in self.values for x in entry.outputs):
                    self._add(entry)
            for old, place in zip(tape.outputs, outputs, strict=True):
                value = self.values.get(id(old), old)
                if value is not place:
                    self.calls += copy(place, value)

    def __call__(self) -> None:
        with torch.inference_mode(), np.errstate(all="ignore"):  # torch does not warn of infinities either
            for call in self.calls:
                call()

    def _groups_of_maps(self, tape: Tape) -> dict[int, list[Entry]]:
        """The linear maps with constant weights, by the id of their input."""
        groups: dict[int, list[Entry]] = {}
        for entry in tape.entries:
            if entry.name == "linear.default" and not entry.kwargs and entry.args[0].ndim >= 2:
                constant = all(id(w) not in self.variable for w in entry.args[1:] if w is not None)
                if constant and entry.args[0].is_floating_point() and entry.args[1].ndim == 2:
                    groups.setdefault(id(entry.args[0]), []).append(entry)
        return groups

    def _add(self, entry: Entry) -> None:
        args, kwargs = replaced(entry.args, self.values), replaced(entry.kwargs, self.values)
        if entry.is_view:
            self._add_view(entry, args, kwargs)
            return
        if entry.name == "linear.default" and self._add_maps(entry, args[0]):
            return
        buffers = [self._buffer(x) for x in entry.outputs]
        self.calls += calls_of(entry, args, kwargs, buffers)
        self.values |= {id(x): buffer for x, buffer in zip(entry.outputs, buffers, strict=True)}

    def _buffer(self, like: Tensor) -> Tensor:
        """Where an output of the tape is written, or new memory."""
        return self.places.get(id(like), torch.zeros(like.shape, dtype=like.dtype))

    def _add_view(self, entry: Entry, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Views of buffers. Where a buffer's strides allow none, of a copy that each call makes."""
        (source,) = [self.values[id(x)] for x in entry.inputs if id(x) in self.values][:1]
        found = _views(entry, args, kwargs, source)
        if found is None:
            packed = torch.zeros(source.shape, dtype=source.dtype)
            self.calls += copy(packed, source)
            found = _views(entry, replaced(args, {id(source): packed}), kwargs, packed)
            if found is None:
                raise ValueError(f"{entry.name} gives no view of a contiguous tensor")
        self.values |= {id(x): view for x, view in zip(entry.outputs, found, strict=True)}

    def _add_maps(self, entry: Entry, x: Tensor) -> bool:
        """All linear maps of x in one product; False if this one is to be computed alone."""
        group = self.groups.get(id(entry.args[0]), [])
        if not any(e is entry for e in group):
            return False
        joined = self.weights.joined([e.args[1] for e in group])
        if joined is None:
            group = [entry]
            joined = self.weights.joined([entry.args[1]])
        weight = entry.args[1].detach().t() if joined is None else joined
        rows = x.reshape(-1, x.shape[-1])
        if rows.data_ptr() != x.data_ptr():
            return False
        biases = [e.args[2] if len(e.args) > 2 else None for e in group]
        alone = id(entry.outputs[0]) in self.places and len(group) == 1
        out = self.places[id(entry.outputs[0])] if alone else torch.zeros(*x.shape[:-1], weight.shape[1], dtype=x.dtype)
        flat = out.view(-1, weight.shape[1])
        if any(bias is not None for bias in biases):
            parts = [
                torch.zeros(len(e.args[1]), dtype=x.dtype) if b is None else b.detach()
                for e, b in zip(group, biases, strict=True)
            ]
            self.calls.append(partial(torch.addmm, torch.cat(parts), rows, weight, out=flat))
        else:
            self.calls.append(partial(torch.mm, rows, weight, out=flat))
        results = out.split([len(e.args[1]) for e in group], -1) if len(group) > 1 else [out]
        self.values |= {id(e.outputs[0]): part for e, part in zip(group, results, strict=True)}
        return True


def _views(entry: Entry, args: tuple[object, ...], kwargs: dict[str, object], source: Tensor) -> list[Tensor] | None:
    """The entry's views of `source`; None if it cannot be viewed so."""
    try:
        found = entry.call(*args, **kwargs)
    except RuntimeError:
        return None
    views = [found] if isinstance(found, Tensor) else list(found)
    address = source.untyped_storage().data_ptr()
    return views if all(x.untyped_storage().data_ptr() == address for x in views) else None
