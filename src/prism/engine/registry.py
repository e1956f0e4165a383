"""Register every memory of this package with `prism.memory`: one table of types, forms and backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prism.engine import cut
from prism.engine.dispatch import Cut, Engine, Path, register
from prism.engine.kernels import fla, serve
from prism.engine.linear.block import parallel
from prism.engine.linear.chunkwise import chunkwise
from prism.engine.linear.recurrent import recurrent
from prism.engine.linear.scan import scan
from prism.engine.memories import attention, diagonal, folded, least_squares, pointwise, scalar_cells, slots
from prism.engine.networks import state as network_state
from prism.engine.networks.chunkwise import chunkwise as network_chunkwise
from prism.engine.networks.recurrent import recurrent as network_recurrent
from prism.engine.networks.serial import (
    kernel_is_automatic,
    kernel_refuses,
    serial,
    serial_by_kernel,
    serial_refuses,
)
from prism.engine.networks.update import InnerUpdate
from prism.engine.update import Update, check_state

LONGEST_CONVOLUTION = 4096
"""Tokens. The table of powers behind a convolution has T·D·N numbers; beyond this a scan is the better choice."""


def _recurrent_or(form: str) -> Callable[[Any], str]:
    """Choose the recurrent form for one token, otherwise `form`."""
    return lambda update: "recurrent" if update.tokens == 1 else form


def _choose_linear(update: Update) -> str:
    return "recurrent" if update.tokens * update.substeps == 1 else "chunkwise"


def _choose_diagonal(update: diagonal.Diagonal) -> str:
    if update.tokens == 1:
        return "recurrent"
    if (
        update.tokens > LONGEST_CONVOLUTION
        or update.reset is not None
        or diagonal.convolution_refuses(update) is not None
    ):
        return "scan"
    return "parallel"


def _choose_network(update: InnerUpdate) -> str:
    if update.tokens == 1:
        return "recurrent"
    return "chunkwise" if serial_refuses(update) else "serial"


register(
    Update,
    Engine(
        paths={
            ("recurrent", "triton"): Path(serve.run_step, serve.refuses, serve.on_gpu),
            ("recurrent", "torch"): Path(recurrent),
            ("parallel", "torch"): Path(parallel),
            ("chunkwise", "triton"): Path(serve.run_chunks, serve.refuses, serve.on_gpu),
            ("chunkwise", "fla"): Path(fla.run, fla.refuses, serve.on_gpu),
            ("chunkwise", "torch"): Path(chunkwise),
            ("scan", "torch"): Path(scan),
        },
        choose=_choose_linear,
        check_state=check_state,
        cut=Cut(cut.linear),
    ),
)

register(
    attention.Attend,
    Engine(
        paths={("recurrent", "torch"): Path(attention.recurrent), ("parallel", "torch"): Path(attention.parallel)},
        choose=lambda update: "parallel",
        check_state=attention.check_state,
        autocast=True,
        cut=Cut(cut.window, cut.window_refuses, lambda update: update.slots or 1),
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
    diagonal.Diagonal,
    Engine(
        paths={
            ("recurrent", "torch"): Path(diagonal.recurrent),
            ("scan", "torch"): Path(diagonal.scan),
            ("parallel", "torch"): Path(diagonal.convolution, diagonal.convolution_refuses),
        },
        choose=_choose_diagonal,
        check_state=diagonal.check_state,
        cut=Cut(cut.diagonal),
    ),
)

register(
    slots.Slots,
    Engine(
        paths={
            ("recurrent", "torch"): Path(slots.recurrent),
            ("recurrent", "triton"): Path(slots.chunkwise_by_kernel, slots.kernel_refuses, lambda update: False),
            ("chunkwise", "triton"): Path(slots.chunkwise_by_kernel, slots.kernel_refuses, slots.on_gpu),
            ("chunkwise", "torch"): Path(slots.chunkwise),
        },
        choose=_recurrent_or("chunkwise"),
        check_state=slots.check_state,
        cut=Cut(cut.slots),
    ),
)

register(
    least_squares.LeastSquares,
    Engine(
        paths={
            ("recurrent", "torch"): Path(least_squares.recurrent),
            ("chunkwise", "torch"): Path(least_squares.chunkwise),
        },
        choose=_recurrent_or("chunkwise"),
        check_state=least_squares.check_state,
        cut=Cut(cut.least_squares),
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
    folded.Folded,
    Engine(paths={}, choose=lambda update: "auto", check_state=folded.check_state, delegate=folded.delegate),
)

register(
    InnerUpdate,
    Engine(
        paths={
            ("recurrent", "torch"): Path(network_recurrent),
            ("chunkwise", "torch"): Path(network_chunkwise),
            ("serial", "triton"): Path(
                serial_by_kernel, lambda update: serial_refuses(update) or kernel_refuses(update), kernel_is_automatic
            ),
            ("serial", "torch"): Path(serial, serial_refuses),
        },
        choose=_choose_network,
        check_state=network_state.check_state,
    ),
)
