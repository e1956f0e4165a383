"""Make a tape shorter without changing what it computes, up to rounding.

what no result needs                 is dropped
the same operation twice             is computed once
sum(square(x)) over the last axis    one dot product
x + a @ b,  x - a ⊗ b                one product that adds
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import Tensor

from prism.engine.tape.record import Entry, Tape, replaced


def shortened(tape: Tape) -> Tape:
    """The tape with all rewrites."""
    tape = _without_repetitions(_alive(tape))
    return _alive(replace(tape, entries=tuple(_fused(tape))))


def _without_repetitions(tape: Tape) -> Tape:
    """The tape with each operation on the same inputs computed once."""
    same: dict[int, Tensor] = {}
    known: dict[str, Entry] = {}
    kept = []
    for entry in tape.entries:
        entry = replace(entry, args=replaced(entry.args, same), kwargs=replaced(entry.kwargs, same))
        key = repr((entry.name, _by_id(entry.args), _by_id(entry.kwargs)))
        first = known.setdefault(key, entry)
        if first is entry:
            kept.append(entry)
        else:
            same |= {id(x): y for x, y in zip(entry.outputs, first.outputs, strict=True)}
    return replace(tape, entries=tuple(kept), outputs=replaced(tape.outputs, same))


def _by_id(tree: Any) -> Any:
    """The tree with the id of each tensor in its place."""
    if isinstance(tree, Tensor):
        return ("tensor", id(tree))
    if isinstance(tree, (list, tuple)):
        return [_by_id(part) for part in tree]
    return {name: _by_id(part) for name, part in tree.items()} if isinstance(tree, dict) else tree


def _alive(tape: Tape) -> Tape:
    """The tape without entries whose outputs are not used."""
    wanted, kept = {id(x) for x in tape.outputs}, list[Entry]()
    for entry in reversed(tape.entries):
        if any(id(x) in wanted for x in entry.outputs):
            wanted |= {id(x) for x in entry.inputs}
            kept.append(entry)
    return replace(tape, entries=tuple(reversed(kept)))


def _fused(tape: Tape) -> list[Entry]:
    uses = Counter(id(x) for entry in tape.entries for x in entry.inputs) + Counter(id(x) for x in tape.outputs)
    made = {id(x): entry for entry in tape.entries for x in entry.outputs}
    return [_add_product(e, made, uses) or _sum_of_squares(e, made, uses) or e for e in tape.entries]


def _once(x: Any, made: dict[int, Entry], uses: Counter[int], *names: str) -> Entry | None:
    """The entry of one of these names that made x, if nothing else reads x."""
    entry = made.get(id(x)) if isinstance(x, Tensor) and uses[id(x)] == 1 else None
    return entry if entry is not None and entry.name in names else None


def _sum_of_squares(entry: Entry, made: dict[int, Entry], uses: Counter[int]) -> Entry | None:
    if entry.name != "sum.dim_IntList" or entry.kwargs or len(entry.args) not in (2, 3):
        return None
    x, dim, keepdim = (*entry.args, False)[:3]
    squared = _once(x, made, uses, "square.default", "pow.Tensor_Scalar")
    if squared is None or list(dim) not in ([-1], [x.ndim - 1]) or squared.args[1:] not in ((), (2,)):
        return None

    def compute(z: Tensor, keepdim: bool) -> Tensor:
        return z.square().sum(-1, keepdim=keepdim)

    return Entry("sum_of_squares", compute, (squared.args[0], bool(keepdim)), {}, entry.outputs, False)


def _add_product(entry: Entry, made: dict[int, Entry], uses: Counter[int]) -> Entry | None:
    """x + a @ b, and x ± a ⊗ b for a `[…, K, 1]` and b `[…, 1, V]`, with x and the result of one shape."""
    sign = {"add.Tensor": 1.0, "sub.Tensor": -1.0}.get(entry.name)
    if sign is None or entry.kwargs or not all(isinstance(x, Tensor) for x in entry.args):
        return None
    (out,) = entry.outputs
    for x, product in (entry.args, entry.args[::-1])[: 2 if sign > 0 else 1]:
        found = _once(product, made, uses, "matmul.default", "mul.Tensor")
        if found is None or out.ndim < 3 or not out.is_floating_point() or not x.shape == product.shape == out.shape:
            continue
        a, b = found.args
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and x.dtype == a.dtype == b.dtype == out.dtype):
            continue
        batch, (rows, columns) = tuple(out.shape[:-2]), tuple(out.shape[-2:])
        outer = tuple(a.shape) == (*batch, rows, 1) and tuple(b.shape) == (*batch, 1, columns)
        if not outer and (found.name == "mul.Tensor" or a.shape[:-2] != batch or b.shape[:-2] != batch):
            continue

        def compute(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
            return x + scale * (a @ b)

        return Entry("add_product", compute, (x, a, b, sign), {}, entry.outputs, False)
    return None
