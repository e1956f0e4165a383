"""One mini-batch after the other, with memory that a training step can afford.

Each mini-batch leaves weights behind that the backward pass would keep. Instead, only those at the start of every
`SEGMENT` mini-batches are kept, and the rest is computed again when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prism.engine.inner_loop.fast import Learned

SEGMENT = 16

Step = Callable[[Learned, Any], tuple[Tensor, Learned]]


def run(step: Step, learned: Learned, rows: list[Any]) -> tuple[Tensor, Learned]:
    """The outputs of `step(learned, row) -> (z, learned)` for every row, stacked, and what the last one left."""
    outputs: list[Tensor] = []
    again = torch.is_grad_enabled() and len(rows) > SEGMENT
    for begin in range(0, len(rows), SEGMENT):
        segment = rows[begin : begin + SEGMENT]
        if again:
            z, learned = checkpoint(_segment, step, learned, segment, use_reentrant=False, preserve_rng_state=False)
        else:
            z, learned = _segment(step, learned, segment)
        outputs += z
    return torch.stack(outputs), learned


def _segment(step: Step, learned: Learned, rows: list[Any]) -> tuple[list[Tensor], Learned]:
    outputs = []
    for row in rows:
        z, learned = step(learned, row)
        outputs.append(z)
    return outputs, learned
