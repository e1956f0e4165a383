"""The whole sequence as one block: one T×T attention matrix per write, and for rules that erase one T×T solve.

Quadratic in T; what a student compares with softmax attention, and a second oracle for the other forms.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from prism.engine.block import affine, blocks, unblocks
from prism.engine.steps import resolve
from prism.engine.update import Update


def parallel(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    steps = resolve(update)
    S = steps.initial(state)
    rows = blocks(steps, steps.rows)
    if update.erases:
        # The T×T system amplifies rounding where reflections (β near 2) meet nearly equal keys: this form is an oracle, so
        # it is solved in float64. Shorter systems (chunkwise) do not need it.
        rows = replace(rows, **{name: x.double() for name, x in vars(rows).items() if _is_floating(x)})
    whole = affine(rows)
    o = whole.F @ S.unsqueeze(2).to(whole.F.dtype) + whole.E
    end = whole.advance(0, S.to(whole.D.dtype))
    return steps.read(unblocks(o, steps.rows)), end.to(S.dtype)


def _is_floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
