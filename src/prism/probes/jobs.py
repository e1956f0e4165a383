"""Run many small training jobs in parallel on one machine, with a progress bar for each."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn

from prism.messages import progress_bars

_channel: Any = None
"""In a worker: queue for progress reports."""
_over: Any = None
"""In a worker: set when the results are no longer wanted."""


def run_jobs(
    function: Callable[..., Any],
    runs: Sequence[Any],
    names: Sequence[str],
    steps: Sequence[int],
    jobs: int | None = None,
    keep: Callable[[list[Any]], None] = lambda results: None,
) -> list[Any]:
    """Call `function(run, report)` for every run, `jobs` at a time; results are in the order of `runs`.

    Args:
        names, steps: description and number of steps of each run, for its bar.
        keep: called after every run with all results so far (None for runs that have not finished), so that an interrupt
            loses only the runs in progress.
    """
    jobs = min(len(runs), jobs or os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        progress_bars(MofNCompleteColumn(), TextColumn("{task.fields[loss]}")) as progress,
    ):
        # An interrupt may break the connection to the manager, so `over` is a plain event of the context.
        channel, over = manager.Queue(), context.Event()
        bars = [
            progress.add_task(name, total=total, loss="", start=False) for name, total in zip(names, steps, strict=True)
        ]
        everything = progress.add_task("all", total=sum(steps), loss="") if len(runs) > 1 else None
        with ProcessPoolExecutor(jobs, context, _start, (channel, over)) as pool:
            futures: list[Future[Any]] = [pool.submit(_work, i, function, run) for i, run in enumerate(runs)]
            known = 0
            try:
                while known < len(futures) or not channel.empty():
                    _drain(channel, progress, bars)
                    if everything is not None:
                        done_steps = sum(progress.tasks[place].completed for place in range(len(bars)))
                        progress.update(everything, completed=done_steps)
                    done = [future.done() for future in futures]
                    if sum(done) > known:
                        known = sum(done)
                        ended = [future if there else None for future, there in zip(futures, done, strict=True)]
                        keep([None if f is None or f.exception() is not None else f.result() for f in ended])
                        for future in filter(None, ended):
                            future.result()  # raise the exception of a failed job
                return [future.result() for future in futures]
            except BaseException:
                over.set()
                for future in futures:
                    future.cancel()
                raise


def _start(channel: Any, over: Any) -> None:
    """Set up a worker."""
    global _channel, _over
    import torch

    torch.set_num_threads(1)  # one run per core is faster than one run on all cores
    _channel, _over = channel, over


def _work(index: int, function: Callable[..., Any], argument: Any) -> Any:
    if _over.is_set():  # a pool queues one job more than it has workers, which cannot be cancelled
        raise KeyboardInterrupt
    return function(argument, lambda step, loss: _channel.put((index, step, loss)))


def _drain(channel: Any, progress: Progress, bars: list[Any]) -> None:
    """Show one progress report, if there is one."""
    try:
        index, step, loss = channel.get(timeout=0.2)
    except queue.Empty:
        return
    if not progress.tasks[index].started:
        progress.start_task(bars[index])
    progress.update(bars[index], completed=step, loss=f"loss {loss:.3f}")
