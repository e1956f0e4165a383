"""Kernels as the host starts them: compiled once for their constants, all of an operator's at the same time.

Triton looks at every argument of every launch to find out what to run. Here that is known: a kernel's code depends on its
constants alone (dtypes and alignment are the caller's promise, sizes are never compiled in), so that a `Program` goes
straight to its compiled code. `compile_together` compiles whatever is started inside it on several threads and starts none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prism.engine.kernels.configurations import Tiling

THREADS = 8


class Program:
    """A kernel and its constants."""

    def __init__(self, kernel: Any, constants: dict[str, Any], how: Tiling) -> None:
        self.kernel = kernel
        # A kernel's own constants, in the order of its signature, which is after all other arguments.
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self.options: dict[str, Any] = {"num_warps": how.warps, "num_stages": how.stages}
        if how.registers is not None:
            self.options["maxnreg"] = how.registers
        self.values = tuple(self.constants.values())
        self.compiled: Any = None

    def start(self, count: int, *arguments: Any) -> None:
        """`count` programs. Tensors begin at multiples of 16 bytes."""
        if self.compiled is not None:
            self.compiled[(count, 1, 1)](*arguments, *self.values)
        elif (together := getattr(_active, "programs", None)) is not None:
            if self not in together:
                together[self] = self.kernel.warmup(*arguments, grid=(count,), **self.constants, **self.options)
        else:  # the interpreter compiles nothing and comes here every time
            self.compiled = _finished(self.kernel[(count,)](*arguments, **self.constants, **self.options))


_active = threading.local()


def compile_together(run: Callable[[], None]) -> None:
    """Programs that `run` starts are compiled side by side, and not run."""
    # In a context of its own: Triton 3.6 stays in its asynchronous mode when it is interrupted.
    copy_context().run(_compile_together, run)


def _compile_together(run: Callable[[], None]) -> None:
    device = torch.cuda.current_device()
    found: dict[Program, Any] = {}
    with ThreadPoolExecutor(THREADS, initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        with triton.AsyncCompileMode(threads):
            _active.programs = found
            try:
                run()
            finally:
                _active.programs = None
        # Compiled by now. `run` builds the host's side of a launch, which takes a C compiler half a second each.
        kernels = [(program, _finished(kernel)) for program, kernel in found.items()]
        list(threads.map(lambda pair: pair[1].run, kernels))
    for program, compiled in kernels:
        program.compiled = compiled


def _finished(kernel: Any) -> Any:
    """A compiled kernel, or what another thread or an interrupted call left to be one."""
    return kernel.result() if hasattr(kernel, "result") else kernel


@contextmanager
def aside(device: torch.device) -> Iterator[Callable[[Tensor], None]]:
    """What is started inside runs beside what follows, until the function that this gives is called with its result."""
    if device.type != "cuda":
        yield lambda result: None
        return
    current, side = torch.cuda.current_stream(device), _side_stream(device)

    def join(result: Tensor) -> None:
        current.wait_stream(side)
        result.record_stream(current)  # it was allocated aside

    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield join


@lru_cache(16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def rows(z: Tensor | None, count: int, width: int) -> TensorDescriptor | None:
    """`[B, T, …]`, contiguous, cut into tiles of `count` tokens × `width` channels."""
    if z is None:
        return None
    B, T = z.shape[:2]
    return _based(_rows_template(B, T, z.numel() // (B * T), count, width, z.dtype), z)


def tiles(z: Tensor | None, count: int, width: int) -> TensorDescriptor | None:
    """`[…, R, columns]`, contiguous, as one tall matrix cut into tiles."""
    if z is None:
        return None
    columns = z.shape[-1]
    return _based(_tiles_template(z.numel() // columns, columns, count, width, z.dtype), z)


@lru_cache(1024)
def _rows_template(B: int, T: int, columns: int, count: int, width: int, dtype: torch.dtype) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(16, dtype=dtype), [B, T, columns], [T * columns, columns, 1], [1, count, width])


@lru_cache(1024)
def _tiles_template(rows: int, columns: int, count: int, width: int, dtype: torch.dtype) -> TensorDescriptor:
    return TensorDescriptor(torch.empty(16, dtype=dtype), [rows, columns], [columns, 1], [count, width])


def _based(template: TensorDescriptor, z: Tensor) -> TensorDescriptor:
    """The template on a tensor's memory. It was checked when it was made; there are dozens of these to a call."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(template.__dict__)
    descriptor.base = z
    return descriptor
