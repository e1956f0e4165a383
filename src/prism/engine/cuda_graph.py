"""Capture what a function does on a GPU as a CUDA graph, and replay it: the host then starts one thing instead of thousands.

A graph repeats kernels on fixed memory. What the function reads must stay where it is, and what it returns is overwritten by
every replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}
"""One for all captures on a device: graphs with a common pool reuse each other's memory only on the same stream."""
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs of failed captures, kept alive (see `_captured`)."""


def capture(
    run: Callable[[], T], device: torch.device, pool: Any = None, errors: str = "thread_local"
) -> tuple[T, torch.cuda.CUDAGraph]:
    """Capture `run`: what it returned, and the graph. Nothing has been computed yet.

    Whatever is compiled on first use must have run before. A capture that fails raises RuntimeError, and the next one works.

    Args:
        pool: `graph.pool()` of an earlier graph, whose memory this one may use because they never run at the same time.
        errors: calls of which threads end the capture, as in `torch.cuda.graph`: `"global"` or `"thread_local"`.
    """
    graph = torch.cuda.CUDAGraph()
    with _lock, torch.cuda.device(device):
        stream = _streams.setdefault(torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):  # restores the stream also when a capture fails
                return _captured(graph, stream, run, pool, errors), graph
        finally:
            torch.cuda.current_stream().wait_stream(stream)


def _captured(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, run: Callable[[], T], pool: Any, errors: str
) -> T:
    """Capture `run` into the graph, and clean up after a failed capture."""
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=errors):
            return run()
    except BaseException:
        # Torch does not clean up after a failed capture. The allocator may still use the graph, so it is kept alive. Random
        # number generators remain in capture mode until another capture ends, so an empty one follows.
        _failed.append(graph)
        again = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode=errors)
        with suppress(RuntimeError), torch.cuda.stream(stream), again:
            torch.zeros(1, device=stream.device)
        raise
