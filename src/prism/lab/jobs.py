"""Run many small training jobs side by side on one machine, in processes that stay alive from job to job.

A worker imports torch and loads kernels once. A job that fails, or kills its worker, costs no other job. One that runs out
of a GPU's memory next to others starts again, and from then on fewer run side by side. Workers end themselves when the
process that started them is gone. They end between kernels: under NVIDIA's MPS, a process that dies within one takes all
others on the GPU with it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn

from prism.messages import progress_bars

START = "spawn"
"""How workers are started: a process that has used a GPU cannot be forked."""
PATIENCE = 10.0
"""Seconds in which a worker may finish what its GPU computes before it is killed."""


@dataclass(frozen=True)
class Job:
    """A call `function(argument, report)`; `report(step, loss)` moves its bar."""

    function: Callable[..., Any]
    argument: Any
    name: str
    steps: int


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    result: Any = None
    error: BaseException | None = None
    details: str = ""
    """The traceback of the error."""

    @property
    def out_of_memory(self) -> bool:
        return "OutOfMemoryError" in (type(self.error).__name__, str(self.error).partition(":")[0])


class _Worker:
    """A process that computes one job after the other."""

    def __init__(self) -> None:
        context: Any = multiprocessing.get_context(START)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()  # the worker's death closes the connection
        self.job: Job | None = None
        self.bar: TaskID | None = None
        self.alone = True
        """Whether no other job has run since this one started."""

    def start(self, job: Job, bar: TaskID) -> None:
        self.job, self.bar, self.alone = job, bar, True
        self.connection.send((job.function, job.argument))

    def stop(self) -> None:
        """Ask the process to end."""
        self.connection.close()
        self.process.terminate()

    def end(self) -> None:
        """Wait until the process has ended."""
        self.stop()
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()


class Workers:
    """At most `count` processes, started when first needed, and the progress bars of their jobs."""

    def __init__(self, count: int, progress: Progress) -> None:
        self.count, self.progress = count, progress
        self.workers: list[_Worker] = []
        self.done = 0.0
        """Steps of the jobs that have ended."""

    def run(
        self,
        waiting: deque[Job],
        steps: int,
        started: Callable[[Job], Any] = lambda job: None,
        until: float = math.inf,
    ) -> Iterator[tuple[Job, Outcome]]:
        """Compute the jobs of a queue; yields each with its outcome as it ends. Meanwhile more may be added to the queue.

        Args:
            steps: steps of all jobs, also those that are added later, for the bar of the whole.
            started: called when a job is given to a worker.
            until: time (`time.monotonic`) at which to stop; `running` then has the jobs that have not ended.
        """
        alone = not waiting or steps <= waiting[0].steps  # one job, and none to come: its own bar is enough
        everything = None if alone else self.progress.add_task("all", total=steps, loss="")
        while waiting or self.running():
            over = time.monotonic() >= until
            if not over:
                self._give(waiting, started)
            for worker in self._ready():
                outcome = self._receive(worker)
                if everything is not None:
                    self.progress.update(everything, completed=self.done + self.moving())
                if outcome is None:
                    continue
                job = worker.job
                assert job is not None and worker.bar is not None
                self.progress.remove_task(worker.bar)
                worker.job = worker.bar = None
                if outcome.out_of_memory and not worker.alone:
                    self._make_room(worker, job)
                    waiting.append(job)
                    continue
                self.done += job.steps
                yield job, outcome
            if over:
                return
        if everything is not None:
            self.progress.update(everything, completed=steps)

    def _make_room(self, worker: _Worker, job: Job) -> None:
        """Run fewer jobs side by side, after one found too little memory next to the others."""
        worker.end()  # what its allocator kept is free for the others
        self.workers.remove(worker)
        self.count = max(1, min(self.count - 1, len(self.running())))
        line = f"{job.name}: out of memory next to other jobs; starts again, with at most {self.count} at a time"
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def running(self) -> list[Job]:
        return [worker.job for worker in self.workers if worker.job is not None]

    def moving(self) -> float:
        """Steps that the running jobs have done."""
        return sum(self._bar(worker).completed for worker in self.workers if worker.bar is not None)

    def end(self) -> None:
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.end()

    def _give(self, waiting: deque[Job], started: Callable[[Job], None]) -> None:
        """Give jobs to idle workers, and to new ones as long as there may be more."""
        for worker in [w for w in self.workers if w.job is None]:
            if not worker.process.is_alive() or len(self.workers) > self.count:
                worker.end()
                self.workers.remove(worker)
        while waiting and len(self.running()) < self.count:
            idle = next((w for w in self.workers if w.job is None), None)
            if idle is None:
                idle = _Worker()
                self.workers.append(idle)
            job = waiting.popleft()
            started(job)
            idle.start(job, self.progress.add_task(job.name, total=job.steps, loss=""))
            busy = [w for w in self.workers if w.job is not None]
            for worker in busy if len(busy) > 1 else ():
                worker.alone = False

    def _ready(self) -> list[_Worker]:
        """Workers that have something to say."""
        busy = {worker.connection: worker for worker in self.workers if worker.job is not None}
        return [busy[connection] for connection in wait(list(busy), timeout=0.5) if isinstance(connection, Connection)]

    def _receive(self, worker: _Worker) -> Outcome | None:
        """Read one message; returns the outcome of a job that has ended."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            code = worker.process.exitcode
            return Outcome(error=RuntimeError(f"the process of this job ended with exit code {code}"))
        if isinstance(message, Outcome):
            return message
        step, loss = message
        assert worker.bar is not None
        self.progress.update(worker.bar, completed=step, loss=f"loss {loss:.3f}")
        return None

    def _bar(self, worker: _Worker) -> Any:
        return next(task for task in self.progress.tasks if task.id == worker.bar)


class _Steps(Protocol):
    @property
    def steps(self) -> int: ...


def steps_of(jobs: Iterable[_Steps]) -> int:
    """The steps of several jobs."""
    return sum(job.steps for job in jobs)


def time_left(seconds: float, done: float, ahead: float) -> str:
    """`about 12 min left`: the time of the steps ahead if they are as fast as those done; empty if there are none.

    Args:
        seconds: what the steps done have taken.
    """
    if done <= 0 or ahead <= 0:
        return ""
    left = seconds * ahead / done
    if left < 90:
        return f"about {max(1, round(left))} s left"
    minutes = round(left / 60)
    return f"about {minutes} min left" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min left"


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    """Workers with progress bars; they are ended with the block."""
    with progress_bars(MofNCompleteColumn(), TextColumn("{task.fields[loss]}")) as progress:
        pool = Workers(count, progress)
        try:
            yield pool
        finally:
            pool.end()


def run_jobs(
    function: Callable[..., Any],
    runs: Sequence[Any],
    names: Sequence[str],
    steps: Sequence[int],
) -> list[Any]:
    """Call `function(run, report)` for every run, one per core at a time; results are in the order of `runs`.

    Args:
        names, steps: description and number of steps of each run, for its bar.
    """
    queue = [Job(function, *one) for one in zip(runs, names, steps, strict=True)]
    places = {id(job): place for place, job in enumerate(queue)}
    results: list[Any] = [None] * len(queue)
    with workers(min(len(queue), os.cpu_count() or 1)) as pool:
        for job, outcome in pool.run(deque(queue), sum(steps)):
            results[places[id(job)]] = outcome.result
            if outcome.error is not None:
                raise outcome.error
    return results


def _serve(connection: Connection, parent: int) -> None:
    """What a worker does: compute jobs until the connection closes."""
    import torch

    torch.set_num_threads(1)  # one run per core is faster than one run on all cores
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGTERM, _leave)
    try:
        while True:
            function, argument = connection.recv()
            connection.send(_compute(function, argument, lambda step, loss: connection.send((step, loss))))
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # other workers may need it
    except (EOFError, OSError, KeyboardInterrupt):
        _leave()


def _compute(function: Callable[..., Any], argument: Any, report: Callable[[int, float], None]) -> Outcome:
    try:
        return Outcome(function(argument, report))
    except BrokenPipeError:  # there is no reader for reports
        raise
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # its class cannot be rebuilt from a message
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return Outcome(error=error, details=traceback.format_exc())


def _leave(*_: object) -> None:
    """End this process once its GPU has computed what was asked of it."""
    import torch

    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a graph is being captured, or the GPU has failed
            torch.cuda.synchronize()
    os._exit(0)  # nothing is left to say, and a thread may still be at work


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)  # the main thread ends it, between two kernels
    time.sleep(PATIENCE)
    os._exit(1)
