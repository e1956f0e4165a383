"""Every memory of this package: the table of update types, forms and backends from which `prism.memory` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prism.engine import sequence_parallel as shared
from prism.engine.kernels import fla, serve
from prism.engine.linear.block import parallel
from prism.engine.linear.chunkwise import chunkwise
from prism.engine.linear.recurrent import recurrent
from prism.engine.linear.scan import scan
from prism.engine.memories import attention, diagonal, folded, least_squares, pointwise, scalar_cells, slots
from prism.engine.memory import Engine, Implementation, register
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
from prism.engine.sequence_parallel import SequenceParallel
from prism.engine.update import Update, check_state

LONGEST_CONVOLUTION = 4096
"""Tokens. The table of powers behind a convolution has T·D·N numbers; beyond this a scan is the better choice."""


def _recurrent_or(form: str) -> Callable[[Any], str]:
    """Choose the recurrent form for one token, otherwise `form`."""
    return lambda update: "recurrent" if update.tokens == 1 else form


def _on_gpu(update: Update) -> bool:
    return update.w.is_cuda and serve.on_gpu(update)  # asked first: on a CPU nothing of the kernels runs


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
        {
            "recurrent": [
                Implementation(serve.run_step, "triton", serve.refuses, _on_gpu),
                Implementation(recurrent),
            ],
            "parallel": [Implementation(parallel)],
            "chunkwise": [
                Implementation(serve.run_chunks, "triton", serve.refuses, _on_gpu),
                Implementation(fla.run, "fla", fla.refuses, _on_gpu),
                Implementation(chunkwise),
            ],
            "scan": [Implementation(scan)],
        },
        choose=_choose_linear,
        check_state=check_state,
        sequence_parallel=SequenceParallel(shared.linear),
    ),
)

register(
    attention.Attend,
    Engine(
        {"recurrent": [Implementation(attention.recurrent)], "parallel": [Implementation(attention.parallel)]},
        choose=lambda update: "parallel",
        check_state=attention.check_state,
        autocast=True,
        sequence_parallel=SequenceParallel(shared.window, shared.window_refuses, lambda update: update.slots or 1),
    ),
)

register(
    pointwise.Pointwise,
    Engine(
        {"recurrent": [Implementation(attention.recurrent)], "parallel": [Implementation(pointwise.parallel)]},
        choose=lambda update: "parallel",
        check_state=attention.check_state,
        autocast=True,
    ),
)

register(
    diagonal.Diagonal,
    Engine(
        {
            "recurrent": [Implementation(diagonal.recurrent)],
            "scan": [Implementation(diagonal.scan)],
            "parallel": [Implementation(diagonal.convolution, refuses=diagonal.convolution_refuses)],
        },
        choose=_choose_diagonal,
        check_state=diagonal.check_state,
        sequence_parallel=SequenceParallel(shared.diagonal),
    ),
)

register(
    slots.Slots,
    Engine(
        {
            "recurrent": [
                Implementation(slots.recurrent),
                Implementation(slots.chunkwise_by_kernel, "triton", slots.kernel_refuses, lambda update: False),
            ],
            "chunkwise": [
                Implementation(slots.chunkwise_by_kernel, "triton", slots.kernel_refuses, slots.on_gpu),
                Implementation(slots.chunkwise),
            ],
        },
        choose=_recurrent_or("chunkwise"),
        check_state=slots.check_state,
        sequence_parallel=SequenceParallel(shared.slots),
    ),
)

register(
    least_squares.LeastSquares,
    Engine(
        {
            "recurrent": [Implementation(least_squares.recurrent)],
            "chunkwise": [Implementation(least_squares.chunkwise)],
        },
        choose=_recurrent_or("chunkwise"),
        check_state=least_squares.check_state,
        sequence_parallel=SequenceParallel(shared.least_squares),
    ),
)

register(
    scalar_cells.ScalarCells,
    Engine(
        {"recurrent": [Implementation(scalar_cells.recurrent)]},
        choose=lambda update: "recurrent",
        check_state=scalar_cells.check_state,
    ),
)

register(
    folded.Folded,
    Engine({}, choose=lambda update: "auto", check_state=folded.check_state, delegate=folded.delegate),
)

register(
    InnerUpdate,
    Engine(
        {
            "recurrent": [Implementation(network_recurrent)],
            "chunkwise": [Implementation(network_chunkwise)],
            "serial": [
                Implementation(
                    serial_by_kernel,
                    "triton",
                    lambda update: serial_refuses(update) or kernel_refuses(update),
                    kernel_is_automatic,
                ),
                Implementation(serial, refuses=serial_refuses),
            ],
        },
        choose=_choose_network,
        check_state=network_state.check_state,
    ),
)
