"""Compute the trainings of a comparison side by side, and keep every result: one JSON line each, safe from a kill.

- A training is known by a hash of its function and settings. One that is finished is never computed again.
- A line is written when a training starts and when it ends, flushed and synced. What a killed process left is a line of a
  training that never ended (it is computed again) or half a line (it is dropped).
- A training that failed is kept with its error, and repeated only if asked for. One that ended without a finite score has
  diverged: it failed too.
- One process writes a file; a second is refused.
- The search for a learning rate comes first. An entry's final trainings come next, before the search of other entries: a
  comparison that is stopped early has complete entries.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from filelock import FileLock, Timeout

from prism import __version__
from prism.files import sync
from prism.lab.jobs import Job, steps_of, time_left, workers
from prism.lab.results import machine
from prism.lab.statistics import estimate

RESULTS = "results.jsonl"
HOMES = {
    "prism.probes.training:probe_job": "prism.lab.probe:probe_job",
    "prism.compare.text:train_text": "prism.lab.text:train_text",
}
"""The name of a training in results → where its function is now. Keys hash the name, so that results outlive a move."""


@dataclass(frozen=True)
class Training:
    """One call of a function with plain settings."""

    function: str
    """`module:function`"""
    settings: dict[str, Any]
    about: dict[str, Any]
    """What it belongs to: task, rule, phase, seed. Not part of its key."""
    name: str
    steps: int

    @cached_property
    def key(self) -> str:
        """A hash of function and settings."""
        text = json.dumps([self.function, self.settings], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


class Searched(Protocol):
    """What a grid computes: trainings that choose a learning rate, then those at the chosen one (see plan.py)."""

    @property
    def rates(self) -> Any: ...

    def search(self) -> list[Training]: ...

    def final(self, rate: float) -> list[Training]: ...


class Records:
    """The lines of a results file: what each training has come to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, dict[str, Any]] = {}
        """By key, the line of each training that counts."""
        self.length = 0
        """Bytes of the whole lines in the file."""
        self.file: IO[bytes] | None = None
        if path.exists():
            self._read()

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            record = parse_line(line)
            if record is None:
                raise ValueError(f"line {number} of {self.path} is damaged: remove it, its run is computed again")
            self._know(_judged(record))
        self.length = len(whole)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open the file for new lines; half a line at its end is dropped. A second process is refused."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"another process is writing {self.path}: wait for it, or choose another folder"
            ) from error
        try:
            if self.path.exists():
                self._read()  # it may have changed before the lock was taken
                with self.path.open("r+b") as file:
                    file.truncate(self.length)
            with self.path.open("ab") as self.file:
                sync(self.path.parent)
                yield
        finally:
            self.file = None
            lock.release()

    def add(self, training: Training, status: str, **more: Any) -> dict[str, Any]:
        """Append a line about a training; returns it as the file has it, so that a restart decides in the same way."""
        assert self.file is not None
        record = {
            "key": training.key,
            "status": status,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **training.about,
            "function": training.function,
            "settings": training.settings,
            **more,
        }
        record = _judged(record)
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        self.file.write(text.encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self._know(record)
        return record

    def _know(self, record: dict[str, Any]) -> None:
        """Keep the last line of a training; a finished one stays finished, in whichever order files were joined."""
        known = self.lines.get(record["key"])
        if known is None or known["status"] != "done" or record["status"] == "done":
            self.lines[record["key"]] = record

    def status(self, training: Training) -> str:
        """`done`, `failed`, `stopped`, `started` (and never ended), or empty."""
        return str(self.lines.get(training.key, {}).get("status", ""))

    def result(self, training: Training) -> dict[str, Any] | None:
        """What a finished training returned; None for any other."""
        record = self.lines.get(training.key)
        return record["result"] if record is not None and record["status"] == "done" else None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line of a results file; None for anything else."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"key", "status"} <= set(record) else None


def _judged(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line with finite numbers alone. One that says `done` of a training without a score says `failed` instead.

    The score is the first of the tests, or without tests that on validation.
    """
    line: dict[str, Any] = finite(record)
    result = line.get("result")
    if line["status"] != "done" or not isinstance(result, dict):
        return line
    label, score = next(iter((result.get("scores") or {}).items()), ("validation", result.get("validation", 0.0)))
    if score is not None:
        return line
    error = f"FloatingPointError: the training diverged: its score{f' ({label})' if label else ''} is not finite"
    return {**line, "status": "failed", "error": error}


def best_rate(entry: Searched, records: Records) -> float | None:
    """The learning rate with the best mean on validation; None if the search has not ended, or every run failed.

    Runs that `stop_at` ends all have about the same score: of rates at which every run reached it, the fastest is best.
    Among equal scores, as where a task is solved, a rate with finished final runs stays; else the lowest training loss wins.
    """
    values: Sequence[float] = entry.rates.values
    search = entry.search()
    if not search:
        return values[0]
    if any(records.status(training) not in ("done", "failed") for training in search):
        return None
    ranks: dict[float, tuple[float, ...]] = {}
    for rate in values:
        tried = [training for training in search if training.about["learning_rate"] == rate]
        found = [result for training in tried if (result := records.result(training)) and _is_number(result)]
        if len(found) == len(tried):  # a rate at which a run failed is not safe
            final = sum(records.status(training) == "done" for training in entry.final(rate))
            loss = estimate(result.get("loss") or 0.0 for result in found).mean
            ranks[rate] = (*_rank(found, tried[0].settings.get("stop_at")), final, -loss)
    return max(ranks, key=lambda rate: ranks[rate]) if ranks else None


def _is_number(result: Mapping[str, Any]) -> bool:
    return result["validation"] is not None and math.isfinite(result["validation"])


def _rank(results: Sequence[Mapping[str, Any]], goal: float | None) -> tuple[bool, float, float]:
    """What orders learning rates, the best one last: whether every run reached the goal, how fast, and the mean score."""
    reached = goal is not None and all(result["validation"] >= goal for result in results)
    steps = estimate(result["steps"] for result in results).mean if reached else 0.0
    sign = 1 if results[0]["better"] == "higher" else -1
    return reached, -steps, sign * estimate(result["validation"] for result in results).mean


class Queue:
    """Decides what to compute next: the search of every entry, and its final trainings once that has ended."""

    def __init__(self, entries: Iterable[Searched], records: Records, retry: bool) -> None:
        self.records, self.retry = records, retry
        self.entries = list(entries)
        """Entries whose final trainings were not yet given out."""
        self.known: set[str] = set()
        self.active: set[str] = set()
        """Keys of trainings that were given out, and of those that have not ended."""

    def next(self) -> list[Training]:
        """The trainings that can be computed now and were not given out before."""
        found: list[Training] = []
        for entry in list(self.entries):
            search = entry.search()
            found += self._missing(search)
            if any(training.key in self.active for training in search):
                continue
            self.entries.remove(entry)
            rate = best_rate(entry, self.records)
            found += [] if rate is None else self._missing(entry.final(rate))
        return found

    def later(self) -> list[Training]:
        """The final trainings that still depend on a search, at any learning rate."""
        return [training for entry in self.entries for training in entry.final(entry.rates.values[0])]

    def _missing(self, trainings: Iterable[Training]) -> list[Training]:
        found = []
        for training in trainings:
            status = self.records.status(training)
            if training.key in self.known or status == "done" or (status == "failed" and not self.retry):
                continue
            self.known.add(training.key)
            self.active.add(training.key)
            found.append(training)
        return found


def run_grid(
    entries: Iterable[Searched], records: Records, jobs: int, retry: bool = False, minutes: float = math.inf
) -> int:
    """Compute what is missing, `jobs` trainings at a time; returns how many trainings were stopped or not begun.

    Args:
        retry: compute failed trainings again.
        minutes: time after which to stop.
    """
    until = time.monotonic() + 60 * minutes
    provenance = {"machine": machine(), "prism": __version__, "command": shlex.join(["prism", *sys.argv[1:]])}
    with records.writing():
        queue = Queue(entries, records, retry)
        trainings: dict[int, Training] = {}

        def jobs_of(found: Iterable[Training]) -> Iterator[Job]:
            for training in found:
                job = Job(call, (training.function, training.settings), training.name, training.steps)
                trainings[id(job)] = training
                yield job

        def started(job: Job) -> None:
            records.add(trainings[id(job)], "started")

        waiting = deque(jobs_of(queue.next()))
        if not waiting:
            return 0
        for training in trainings.values():
            check_machine(training)
        later = queue.later()
        total, count, since = len(waiting) + len(later), 0, time.monotonic()
        steps = steps_of(waiting) + steps_of(later)
        with workers(min(jobs, total)) as pool:
            try:
                for job, outcome in pool.run(waiting, steps, started, until):
                    training, count = trainings[id(job)], count + 1
                    if outcome.error is None:
                        record = records.add(training, "done", result=outcome.result, **provenance)
                    else:
                        error = f"{type(outcome.error).__name__}: {outcome.error}"
                        record = records.add(training, "failed", error=error, details=outcome.details, **provenance)
                    queue.active.discard(training.key)
                    waiting.extendleft(reversed(list(jobs_of(queue.next()))))
                    ahead = steps_of((*waiting, *pool.running(), *queue.later())) - pool.moving()
                    left = time_left(time.monotonic() - since, pool.done + pool.moving(), ahead)
                    line = f"{count}/{total} {training.name}: {summary(record)}{left and f'; {left}'}"
                    pool.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
            except BaseException as error:
                for job in pool.running():
                    records.add(trainings[id(job)], "stopped", error=type(error).__name__, **provenance)
                raise
            stopped = pool.running()
            for job in stopped:
                records.add(trainings[id(job)], "stopped", error=f"{minutes:g} minutes were over", **provenance)
        return len(stopped) + len(waiting) + sum(records.status(training) != "done" for training in queue.later())


def check_machine(training: Training) -> None:
    """Raise a ValueError if this machine lacks the GPU that a training needs, before hundreds of them fail for it."""
    device, graph = training.settings.get("device", "auto"), training.settings.get("graph", False)
    count = torch.cuda.device_count()
    if str(device).startswith("cuda") and count <= (torch.device(device).index or 0):
        raise ValueError(
            f"{training.name} needs device {device!r}, but this machine has {count or 'no'} GPU{'s' * (count > 1)}"
        )
    if graph and (device == "cpu" or not count):
        raise ValueError(f"{training.name} has options.graph, which needs a GPU: set graph = false in the plan")


def call(what: tuple[str, Mapping[str, Any]], report: Callable[[int, float], None]) -> Any:
    """Call `module:function` with settings, in a worker."""
    module, name = HOMES.get(what[0], what[0]).split(":")
    return getattr(import_module(module), name)(what[1], report)


def summary(record: Mapping[str, Any]) -> str:
    """One phrase on how a training ended."""
    if record["status"] != "done":
        return f"{record['status']}, {record['error'].splitlines()[0]}"
    result = record["result"]
    scores = "; ".join(
        f"{label} {value:.3f}".strip() for label, value in result.get("scores", {}).items() if value is not None
    )
    judged = result.get("validation")
    return (
        f"{scores or (f'validation {judged:.4g}' if judged is not None else 'done')} ({result.get('seconds', 0):.0f} s)"
    )


def finite(value: Any) -> Any:
    """A value for JSON: tuples become lists, and numbers that are not finite None."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
