"""The whole sequence as one block: one T×T attention matrix per write, and for rules that erase one T×T solve.

Quadratic in T; what a student compares with softmax attention, and a second oracle for the other forms.
"""

from __future__ import annotations

from torch import Tensor

from prism.engine.block import affine, blocks, unblocks
from prism.engine.steps import resolve
from prism.engine.update import Update


def parallel(update: Update, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    steps = resolve(update)
    S = steps.initial(state)
    whole = affine(blocks(steps, steps.rows))
    o = whole.F @ S.unsqueeze(2) + whole.E
    return steps.read(unblocks(o, steps.rows)), whole.advance(0, S)
