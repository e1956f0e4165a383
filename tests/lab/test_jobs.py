"""Jobs side by side: one that finds too little memory next to others starts again, and none ends within a kernel."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab import jobs as side_by_side
from prism.lab.jobs import Job, Outcome, time_left, workers

SEATS = 2
"""Jobs that fit into the pretended memory."""


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start in milliseconds, where it does not matter how they start."""
    monkeypatch.setattr(side_by_side, "START", "fork")


forked = pytest.mark.usefixtures("_forked")


def seated(argument: tuple[str, int], report: Callable[[int, float], None]) -> int:
    """Keep one of the seats until a third job has come; without a free one run out of memory, as on a full GPU."""
    folder, number = argument
    tries = Path(folder, "tries")
    with tries.open("a") as file:
        file.write(f"{number}\n")
    for seat in range(SEATS):
        mark = Path(folder, f"seat {seat}")
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            continue
        while len(tries.read_text().split()) <= SEATS:
            time.sleep(0.01)
        time.sleep(0.2)  # the third looks for a seat meanwhile
        mark.unlink()
        return number
    raise torch.OutOfMemoryError("CUDA out of memory.")


def full(argument: int, report: Callable[[int, float], None]) -> int:
    """Run out of memory, alone or not."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


def outcomes(jobs: list[Job], count: int) -> tuple[dict[str, Outcome], int]:
    with workers(count) as pool:
        found = {job.name: outcome for job, outcome in pool.run(deque(jobs), len(jobs))}
        return found, pool.count


def test_jobs_that_do_not_fit_side_by_side_all_end(tmp_path: Path) -> None:
    jobs = [Job(seated, (str(tmp_path), number), f"job {number}", 1) for number in range(4)]
    found, count = outcomes(jobs, 3)
    assert {name: outcome.result for name, outcome in found.items()} == {job.name: job.argument[1] for job in jobs}
    assert len((tmp_path / "tries").read_text().split()) == len(jobs) + 1
    assert count == SEATS


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.floats(0.1, 1e6))
def test_the_time_left_is_that_of_the_steps_ahead(seconds: float, done: float, ahead: float) -> None:
    words = re.fullmatch(r"about (?:(\d+) h )?(?:(\d+) (min|s)) left", time_left(seconds, done, ahead))
    assert words is not None
    hours, number, unit = words.groups()
    said = 3600 * int(hours or 0) + int(number) * (60 if unit == "min" else 1)
    assert said == pytest.approx(seconds * ahead / done, abs=31 if unit == "min" else 1)


def test_the_time_left_in_words() -> None:
    assert time_left(60, 10, 120) == "about 12 min left"
    assert time_left(60, 10, 5) == "about 30 s left"
    assert time_left(60, 10, 1250) == "about 2 h 5 min left"
    assert time_left(60, 0, 10) == time_left(60, 10, 0) == ""


@forked
@pytest.mark.parametrize(("more", "bars"), [(0, 0), (5, 1)])
def test_there_is_a_bar_for_the_whole_if_more_will_come(more: int, bars: int) -> None:
    """One job is waiting; others follow from what it finds."""
    with workers(1) as pool:
        for _ in pool.run(deque([Job(full, 0, "job", 3)]), 3 + more):
            assert [task.description for task in pool.progress.tasks] == ["all"] * bars
            assert pool.done == 3


@forked
def test_a_job_that_does_not_fit_alone_has_failed() -> None:
    found, _ = outcomes([Job(full, number, f"job {number}", 1) for number in range(2)], 2)
    assert {name: type(outcome.error) for name, outcome in found.items()} == dict.fromkeys(
        ["job 0", "job 1"], torch.OutOfMemoryError
    )


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (None, False),
        (ValueError("out of range"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("OutOfMemoryError: CUDA out of memory."), True),
    ],
)
def test_only_a_lack_of_memory_is_tried_again(error: Exception | None, memory: bool) -> None:
    assert Outcome(error=error).out_of_memory == memory


def computing(folder: str, report: Callable[[int, float], None]) -> None:
    """Never end, with kernels under way on a pretended GPU."""

    def wait() -> None:
        time.sleep(0.3)
        Path(folder, "kernels ended").touch()

    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lambda device=None: wait()
    Path(folder, "started").touch()
    while True:
        time.sleep(0.01)


def deaf(folder: str, report: Callable[[int, float], None]) -> None:
    """Never end, nor listen."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Path(folder, "started").touch()
    time.sleep(600)


def end_when_started(job: Job, mark: Path) -> None:
    """End the pool of a job that has set its mark."""
    with workers(1) as pool:
        pool._give(deque([job]), lambda job: None)
        while not mark.exists():
            time.sleep(0.01)
        (worker,) = pool.workers
    assert not worker.process.is_alive()


@forked
def test_a_worker_ends_after_what_its_gpu_computes(tmp_path: Path) -> None:
    end_when_started(Job(computing, str(tmp_path), "job", 1), tmp_path / "started")
    assert (tmp_path / "kernels ended").exists()


@forked
def test_a_worker_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "PATIENCE", 0.2)
    end_when_started(Job(deaf, str(tmp_path), "job", 1), tmp_path / "started")
