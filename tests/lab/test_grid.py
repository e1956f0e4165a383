"""A grid of trainings: nothing finished is lost or repeated, whatever ends the process that computes it."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.lab import jobs
from prism.lab.grid import Records, Training, best_rate, finite, run_grid
from tests.lab.toys import Toy

DEADLINE = 60.0


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start in milliseconds; the trainings here use no threads."""
    monkeypatch.setattr(jobs, "START", "fork")


def calls(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from (json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("needs", "complaint"),
    [
        ({"device": "cuda:99"}, "toy final 1.0 0 needs device 'cuda:99', but this machine has"),
        ({"device": "cpu", "graph": True}, "toy final 1.0 0 has options.graph, which needs a GPU: set graph = false"),
    ],
)
def test_without_the_gpu_that_a_plan_needs_nothing_starts(
    needs: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, toy = tmp_path / "results.jsonl", Toy(str(tmp_path / "log"), values=(1.0,))
    trainings = [replace(one, settings=one.settings | needs) for one in toy.final(1.0)]
    monkeypatch.setattr(Toy, "final", lambda *_: trainings)
    with pytest.raises(ValueError, match=complaint):
        run_grid([toy], Records(path), 2)
    assert not path.exists() or not path.read_text()


def test_the_search_decides_and_every_seed_is_trained_once(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "out" / "results.jsonl"
    entries = [Toy(str(log)), Toy(str(log), "alone", values=(1.0,))]
    run_grid(entries, Records(path), 2)
    found = Counter(tuple(words[1:]) for words in calls(log))
    searched = {("toy", "1.0", "100"), ("toy", "2.0", "100")}
    final = {("toy", "2.0", "0"), ("toy", "2.0", "1"), ("alone", "1.0", "0"), ("alone", "1.0", "1")}
    assert set(found) == searched | final and set(found.values()) == {1}
    records = Records(path)
    assert best_rate(entries[0], records) == 2.0 and best_rate(entries[1], records) == 1.0
    assert [records.result(training)["scores"][""] for training in entries[0].final(2.0)] == [2.0, 3.0]
    done = [line for line in lines(path) if line["status"] == "done"]
    assert len(done) == 6 and all(line["machine"]["torch"] and line["prism"] and line["command"] for line in done)
    run_grid(entries, Records(path), 2)
    assert len(calls(log)) == 6


def test_an_entry_is_completed_before_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_grid([Toy(str(log), "first"), Toy(str(log), "second")], Records(tmp_path / "results.jsonl"), 1)
    assert [words[1] for words in calls(log)] == ["first"] * 4 + ["second"] * 4


def test_a_new_seed_adds_only_its_own_runs(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    run_grid([Toy(str(log))], Records(path), 1)
    run_grid([Toy(str(log), seeds=(0, 1, 2))], Records(path), 1)
    assert [words[1:] for words in calls(log)[4:]] == [["toy", "2.0", "2"]]


def test_a_failed_run_is_kept_with_its_error_and_repeated_only_if_asked(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    (tmp_path / "log.broken").touch()
    entry = Toy(str(log), fails=2.0)
    run_grid([entry], Records(path), 1)
    failed = [line for line in lines(path) if line["status"] == "failed"]
    assert [line["error"] for line in failed] == ["ValueError: this rate fails"]
    assert "compute" in failed[0]["details"]
    assert best_rate(entry, Records(path)) == 1.0  # the rate that failed is not chosen
    (tmp_path / "log.broken").unlink()
    before = len(calls(log))
    run_grid([entry], Records(path), 1)
    assert len(calls(log)) == before
    run_grid([entry], Records(path), 1, retry=True)
    assert best_rate(entry, Records(path)) == 2.0
    assert [words[1:] for words in calls(log)[before:]] == [["toy", "2.0", str(seed)] for seed in (100, 0, 1)]


def test_a_run_without_a_finite_score_has_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    entry = Toy(str(log), values=(1.0,), diverges=(1,))
    records = Records(path)
    run_grid([entry], records, 1)
    for known in (records, Records(path)):
        assert [known.status(training) for training in entry.final(1.0)] == ["done", "failed"]
        assert known.result(entry.final(1.0)[1]) is None
    (failed,) = (line for line in lines(path) if line["status"] == "failed")
    assert failed["error"] == "FloatingPointError: the training diverged: its score is not finite"
    assert failed["result"]["scores"] == {"": None} and failed["result"]["curve"]  # what it came to is kept
    assert "toy final 1.0 1: failed, FloatingPointError: the training diverged" in capfd.readouterr().err
    run_grid([entry], Records(path), 1)
    assert len(calls(log)) == 2
    run_grid([entry], Records(path), 1, retry=True)
    assert [words[1:] for words in calls(log)[2:]] == [["toy", "1.0", "1"]]


def test_results_that_others_wrote_are_judged_too(tmp_path: Path) -> None:
    """Files of older versions say `done` of a diverged run. A final run without a validation is not one."""
    entry, path = Toy("log", values=(1.0,), seeds=(0, 1, 2, 3)), tmp_path / "results.jsonl"
    results = ({"scores": {"a": None}}, {"scores": {"a": 1.0}, "validation": None}, {"validation": None}, {})
    both = zip(entry.final(1.0), results, strict=True)
    text = "".join(json.dumps({"key": t.key, "status": "done", "result": result}) + "\n" for t, result in both)
    path.write_text(text)
    assert [Records(path).status(t) for t in entry.final(1.0)] == ["failed", "done", "failed", "done"]


SCORES = st.floats(-10, 10) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(SCORES, min_size=2, max_size=4), st.sampled_from(["higher", "lower"]))
def test_the_chosen_rate_is_finite_and_the_same_after_a_restart(scores: list[float], better: str) -> None:
    entry = Toy("log", values=tuple(range(1, len(scores) + 1)))
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(folder, "results.jsonl"))
        with records.writing():
            for training, score in zip(entry.search(), scores, strict=True):
                records.add(training, "done", result={"scores": {}, "validation": score, "better": better})
        rate = best_rate(entry, records)
        assert rate == best_rate(entry, Records(records.path))
    good = [score for score in scores if math.isfinite(score)]
    assert (rate is None) == (not good)
    if rate is not None:
        assert scores[int(rate) - 1] == (max if better == "higher" else min)(good)


@dataclass(frozen=True)
class Goal(Toy):
    """Trainings that stop at a score."""

    stop_at: float | None = 0.9
    tries: int = 1
    """Seeds of the search."""

    def search(self) -> list[Training]:
        return [self._training("search", rate, 100 + n) for rate in self.values for n in range(self.tries)]

    def _training(self, phase: str, rate: float, seed: int) -> Training:
        training = super()._training(phase, rate, seed)
        return replace(training, settings={**training.settings, "stop_at": self.stop_at})


@pytest.mark.parametrize(
    ("goal", "found", "best"),
    [
        (0.9, [(0.91, 50), (0.95, 80)], 1.0),  # both reached it: the fewer steps
        (0.9, [(0.91, 50), (0.95, 50)], 2.0),  # as many: the score
        (0.9, [(0.91, 90), (0.89, 100)], 1.0),  # one of them
        (0.9, [(0.7, 100), (0.8, 100)], 2.0),  # none
        (None, [(0.91, 50), (0.95, 80)], 2.0),  # without a goal only the score counts
        (0.9, [(0.91, 90), (0.92, 90), (1.0, 50), (0.85, 100)], 1.0),  # every seed of one rate, one seed of the other
    ],
)
def test_of_rates_that_reach_the_goal_the_fastest_is_best(
    tmp_path: Path, goal: float | None, found: list[tuple[float, int]], best: float
) -> None:
    entry, records = Goal("log", stop_at=goal, tries=len(found) // 2), Records(tmp_path / "results.jsonl")
    with records.writing():
        for training, (score, steps) in zip(entry.search(), found, strict=True):
            records.add(training, "done", result={"validation": score, "steps": steps, "better": "higher"})
    assert best_rate(entry, records) == best


def test_of_rates_with_equal_scores_the_lower_loss_is_best_until_one_is_used(tmp_path: Path) -> None:
    """A task that every rate solves: the score does not tell which is safer."""
    entry, records = Toy("log", values=(1.0, 2.0, 3.0)), Records(tmp_path / "results.jsonl")
    with records.writing():
        for training, (score, loss) in zip(entry.search(), [(1.0, 0.3), (1.0, 0.1), (0.9, 0.0)], strict=True):
            records.add(training, "done", result={"validation": score, "loss": loss, "better": "higher"})
        assert best_rate(entry, records) == 2.0
        for training in entry.final(1.0):  # results of an earlier version, which took the first
            records.add(training, "done", result={"validation": 1.0, "better": "higher"})
    assert best_rate(entry, records) == 1.0


def test_a_log_says_how_long_the_rest_takes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All but the last line of a run: then nothing is left."""
    run_grid([Toy(str(tmp_path / "log"))], Records(tmp_path / "results.jsonl"), 1)
    said = [line for line in capfd.readouterr().err.splitlines() if re.match(r"\d/4 ", line)]
    assert [bool(re.search(r"\); about \d+ s left$", line)) for line in said] == [True, True, True, False]


def test_a_run_that_ends_its_process_costs_no_other(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    run_grid([Toy(str(log), values=(-1.0,), seeds=(0,)), Toy(str(log), "good", values=(1.0,))], Records(path), 1)
    ended = {(line["rule"], line["status"]) for line in lines(path) if line["status"] != "started"}
    assert ended == {("toy", "failed"), ("good", "done")}
    assert any("exit code 7" in line.get("error", "") for line in lines(path))


def test_half_a_line_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    run_grid([Toy(str(log))], Records(path), 1)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: last + 40])
    run_grid([Toy(str(log))], Records(path), 1)
    assert len(calls(log)) == 5
    assert len([line for line in lines(path) if line["status"] == "done"]) == 4
    path.write_bytes(b'{"key": 1\n' + whole)
    with pytest.raises(ValueError, match=r"line 1 of .* is damaged"):
        Records(path)


def test_files_of_several_machines_can_be_joined(tmp_path: Path) -> None:
    """A run that is finished in one of them is finished, although another was stopped in it."""
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    entry = Toy(str(log), values=(1.0,))
    run_grid([entry], Records(path), 1)
    other = Records(tmp_path / "other.jsonl")
    with other.writing():
        other.add(entry.final(1.0)[0], "started")
        other.add(entry.final(1.0)[0], "stopped", error="KeyboardInterrupt")
    for joined in ([path, other.path], [other.path, path]):
        both = tmp_path / "both.jsonl"
        both.write_bytes(b"".join(part.read_bytes() for part in joined))
        run_grid([entry], Records(both), 1)
        assert len(calls(log)) == 2


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Records(path).writing(), pytest.raises(ValueError, match="another process is writing"):
        run_grid([Toy(str(tmp_path / "log"))], Records(path), 1)
    assert not (tmp_path / "log").exists()


def test_an_interrupt_is_in_the_file_and_the_run_is_computed_again(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    entry = Toy(str(log), values=(1.0,), seeds=(0,), seconds=0.5)
    child = multiprocessing.get_context("fork").Process(target=compute_all, args=(path, [entry], 0))
    child.start()
    wait_for(lambda: bool(calls(log)))
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    child.join(DEADLINE)
    assert [line["status"] for line in lines(path)] == ["started", "stopped"]
    run_grid([entry], Records(path), 1)
    assert [line["status"] for line in lines(path)] == ["started", "stopped", "started", "done"]


def test_after_its_minutes_a_grid_stops_and_can_be_continued(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    quick, slow = Toy(str(log), "quick"), Toy(str(log), "slow", seconds=DEADLINE)
    waits = tmp_path / "log.waits"
    waits.touch()
    assert run_grid([quick, slow], Records(path), 1, minutes=0.1) == 4  # one of four runs of `slow` had started
    found = {(line["rule"], line["status"]) for line in Records(path).lines.values()}
    assert found == {("quick", "done"), ("slow", "stopped")}
    assert [line["error"] for line in lines(path) if line["status"] == "stopped"] == ["0.1 minutes were over"]
    waits.unlink()
    assert run_grid([quick, slow], Records(path), 1) == 0
    assert [words[1] for words in calls(log)] == ["quick"] * 4 + ["slow"] * 5
    assert {line["status"] for line in Records(path).lines.values()} == {"done"}


def test_what_has_ended_before_the_time_was_over_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job's result is not read before the time is over; the second is never given to a worker."""
    waiting = deque([jobs.Job(_twice, 21, "job", 1), jobs.Job(_twice, 4, "never", 1)])
    with jobs.workers(1) as pool:
        ready, looks, until = pool._ready, itertools.count(), time.monotonic() + 0.3

        def late() -> list[Any]:
            if next(looks):
                return ready()
            assert pool.workers[0].connection.poll(DEADLINE)
            wait_for(lambda: time.monotonic() >= until)
            return []

        monkeypatch.setattr(pool, "_ready", late)
        assert [outcome.result for _, outcome in pool.run(waiting, 2, until=until)] == [42]
    assert [job.name for job in waiting] == ["never"]


def _twice(number: int, report: Any) -> int:
    return 2 * number


def test_killed_at_five_moments_it_loses_no_finished_run_and_repeats_none(tmp_path: Path) -> None:
    log, path = tmp_path / "log", tmp_path / "results.jsonl"
    entries = [Toy(str(log), f"toy{n}", seeds=(0, 1, 2), seconds=0.02) for n in range(12)]
    moments = random.Random(5)
    finished: list[set[str]] = []
    for number in range(5):
        child = multiprocessing.get_context("fork").Process(target=compute_all, args=(path, entries, number))
        child.start()
        enough = len(calls(log)) + moments.randint(1, 6)
        wait_for(lambda enough=enough: len(calls(log)) >= enough)
        time.sleep(moments.uniform(0.0, 0.02))  # anywhere between the start of a run and its line
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(DEADLINE)
        finished.append({key for key, line in Records(path).lines.items() if line["status"] == "done"})
    assert 0 < len(finished[-1]) < 60, "the kills must come in between"
    compute_all(path, entries, 5)
    done = Counter(line["key"] for line in lines(path) if line["status"] == "done")
    wanted = {t.key for entry in entries for t in (*entry.search(), *entry.final(2.0))}
    assert set(done) == wanted and set(done.values()) == {1}
    records = Records(path)
    names = {key: [line["rule"], str(line["learning_rate"]), str(line["seed"])] for key, line in records.lines.items()}
    for number, keys in enumerate(finished):
        assert keys <= set(done)
        later = [words[1:] for words in calls(log) if int(words[0]) > number]
        assert not [names[key] for key in keys if names[key] in later]


def compute_all(path: Path, entries: list[Toy], number: int) -> None:
    """Compute a grid; what a killed process has left may hold the lock until its workers have seen that they are alone."""
    os.environ["ROUND"] = str(number)
    wait_for(lambda: _is_free(path))
    run_grid(entries, Records(path), 2)


def _is_free(path: Path) -> bool:
    """Whether the lock can be taken."""
    try:
        with Records(path).writing():
            return True
    except ValueError:
        return False


def wait_for(happened: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not happened():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def test_json_has_no_infinite_numbers() -> None:
    assert finite({"a": (1.0, float("nan")), 2: [float("inf")]}) == {"a": [1.0, None], "2": [None]}
