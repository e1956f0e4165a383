"""Several worker processes on one port: start them, start them again if they die, stop them together."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from prism.serve.logs import say_event, set_up_logs

QUICK_DEATH = 5.0
"""Seconds: a worker that dies sooner after its start cannot start at all."""
GIVE_UP = 3
"""Quick deaths in a row after which the service ends."""
FAILED = 3


def supervise(work: Callable[..., Any], arguments: tuple[Any, ...], workers: int, grace: float) -> int:
    """Run `work(number, *arguments)` in `workers` processes until SIGTERM or Ctrl-C; returns the exit code.

    Args:
        grace: seconds that a worker gets to stop; then it is killed.
    """
    set_up_logs()
    context = multiprocessing.get_context("spawn")
    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    running: dict[int, tuple[BaseProcess, float]] = {}
    deaths = 0
    try:
        while not stop.is_set() and deaths < GIVE_UP:
            for number in range(workers):
                process, started = running.get(number, (None, 0.0))
                if process is not None and process.is_alive():
                    continue
                if process is not None:
                    deaths = deaths + 1 if time.monotonic() - started < QUICK_DEATH else 0
                    say_event("worker died", worker=number, code=process.exitcode)
                process = context.Process(target=work, args=(number, *arguments), name=f"worker {number}")
                process.start()
                running[number] = (process, time.monotonic())
            stop.wait(0.2)
    finally:
        _stop([process for process, _ in running.values()], grace)
        for number, handler in before.items():
            signal.signal(number, handler)
    return FAILED if deaths >= GIVE_UP else 0


def _stop(processes: list[BaseProcess], grace: float) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace + 5.0
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
