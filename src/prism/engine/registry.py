"""The memories beyond the linear one, each with the forms it has."""

from __future__ import annotations

from typing import Any

from prism.engine.dispatch import Engine, Path, register
from prism.engine.memories import attention, diagonal, folded, least_squares, pointwise, scalar_cells, slots
from prism.engine.memories import diagonal as convolution

LONGEST_KERNEL = 4096
"""Tokens. The table of powers behind a convolution has T·D·N numbers; beyond this a scan is the better choice."""


def _sequential_or(form: str) -> Any:
    return lambda update: "recurrent" if update.tokens == 1 else form


def _choose_diagonal(update: diagonal.Diagonal) -> str:
    if update.tokens == 1:
        return "recurrent"
    if update.tokens > LONGEST_KERNEL or update.reset is not None or convolution.refuses(update) is not None:
        return "scan"
    return "parallel"


register(
    diagonal.Diagonal,
    Engine(
        paths={
            ("recurrent", "torch"): Path(diagonal.recurrent),
            ("scan", "torch"): Path(diagonal.scan),
            ("parallel", "torch"): Path(convolution.convolution, convolution.refuses),
        },
        choose=_choose_diagonal,
        check_state=diagonal.check_state,
    ),
)

register(
    slots.Slots,
    Engine(
        paths={("recurrent", "torch"): Path(slots.recurrent), ("chunkwise", "torch"): Path(slots.chunkwise)},
        choose=_sequential_or("chunkwise"),
        check_state=slots.check_state,
    ),
)

register(
    least_squares.LeastSquares,
    Engine(
        paths={
            ("recurrent", "torch"): Path(least_squares.recurrent),
            ("chunkwise", "torch"): Path(least_squares.chunkwise),
        },
        choose=_sequential_or("chunkwise"),
        check_state=least_squares.check_state,
    ),
)

register(
    scalar_cells.ScalarCells,
    Engine(
        paths={("recurrent", "torch"): Path(scalar_cells.recurrent)},
        choose=lambda update: "recurrent",
        check_state=scalar_cells.check_state,
    ),
)

register(
    pointwise.Pointwise,
    Engine(
        paths={("recurrent", "torch"): Path(attention.recurrent), ("parallel", "torch"): Path(pointwise.parallel)},
        choose=lambda update: "parallel",
        check_state=attention.check_state,
        autocast=True,
    ),
)

register(
    folded.Folded,
    Engine(paths={}, choose=lambda update: "auto", check_state=folded.check_state, delegate=folded.delegate),
)
