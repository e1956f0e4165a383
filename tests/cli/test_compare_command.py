"""`prism compare` and `prism probe TASK`: the how-to's plan runs, is resumed, and mistakes are said before any training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prism.cli import compare as command
from prism.cli import main
from prism.lab import jobs
from prism.lab.grid import Records

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "compare.md"
SMALL = ["--steps", "2", "--seeds", "2", "--width", "16", "--batch", "4", "--jobs", "1", "--device", "cpu"]
SETS = ["budget.validation_sequences=8", "budget.test_sequences=8", "budget.evaluations=1"]


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "START", "fork")


def howto_plan() -> str:
    (found,) = re.findall(r"^```toml title=\"recall.toml\"\n(.*?)^```$", HOWTO.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_plan_of_the_howto_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on the page, with fewer steps."""
    text = re.sub(r"^(steps|test_sequences|validation_sequences) = \d+", r"\1 = 2", howto_plan(), flags=re.MULTILINE)
    text = text.replace("seeds = [0, 1, 2]", "seeds = [0, 1]")
    plan, out = tmp_path / "recall.toml", tmp_path / "out"
    plan.write_text(text)
    assert main(["compare", str(plan), "--out", str(out), "--dry-run"]) == 0
    assert "24 runs" in capsys.readouterr().out and not out.exists()
    words = ["compare", str(plan), "--out", str(out), "--jobs", "2", "--only", "linear, state 512"]
    assert main([*words, "--seeds", "1", "--minutes", "1e-9"]) == 0
    assert "with 9 runs to go: the same command continues" in capsys.readouterr().out
    assert main([*words, "--seeds", "1"]) == 0
    done = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {line["seed"] for line in done if line["status"] == "done"} == {1, 100}
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "recall, linear, state 512" in printed and "report.html" in printed
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sum(line["status"] == "done" for line in lines) == 12, "those of 512, and the reference's"
    assert main(words) == 0
    assert len((out / "results.jsonl").read_text().splitlines()) == len(lines), "nothing is repeated"
    assert (out / "score-by-length.png").exists() and (out / "report.html").exists()


def test_a_probe_is_a_plan_of_one_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism.lab.tasks.catalogue import TASKS

    monkeypatch.setitem(TASKS, "recall", "mqar:Recall")
    words = ["probe", "recall", *SMALL, "--set", "pairs=2", "length=8", "vocabulary=16", *SETS]
    assert main([*words, "--learning-rates", "1e-2", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "difference to" in printed and "2 seeds are too few for a verdict" in printed
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    done = [line for line in lines if line["status"] == "done"]
    assert len(done) == 4 and {line["settings"]["task_options"]["pairs"] for line in done} == {2}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["probe", "parrity"], "unknown task 'parrity' (did you mean 'parity'?)"),
        (["probe", "text"], "text is no synthetic task: `prism compare FILE.toml` compares rules on text"),
        (["probe", "parity", "--rules", "delta", "mesa"], "make them equal, or give --set budget.equal_state=false"),
        (["probe", "mqar2", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["probe", "mqar2", "--rules"], "rules is empty: name one or more of prism, "),
        (["compare", "PLAN", "--only", "("], "--only must be a regular expression, got '('"),
        (["compare", "PLAN", "--only", "xyz"], "--only 'xyz' finds none of the runs"),
        (["compare", "PLAN", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["compare", "PLAN", "--seeds", "0", "7"], "--seeds must be some of the plan's, 0 1 2; got 0 7"),
        (["compare", "PLAN", "--minutes", "0"], "minutes must be above 0, got 0"),
        (["compare", "NONE"], "there is no settings file"),
    ],
)
def test_mistakes_are_said_before_any_training(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recall.toml").write_text(howto_plan())
    places = {"PLAN": "recall.toml", "NONE": "none.toml"}
    assert main([places.get(word, word) for word in words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_list_that_is_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tyro takes the last one and drops the others."""
    out = ["--output", str(tmp_path / "out"), "--dry-run"]
    assert main(["probe", "needle", "--set", "level=2", "--set", "length=64", *out]) == 2
    assert "--set is given twice: put all its values after one --set" in capsys.readouterr().err
    assert main(["train", "lm", "--optimizer.groups", "a=lr:1", "--optimizer.groups=b=lr:1", "--steps=1"]) == 2
    assert "--optimizer.groups is given twice" in capsys.readouterr().err
    assert main(["probe", "needle", "--set", "level=2", "length=64", "--steps", "3", "--steps", "4", *out]) == 0


def test_a_wrong_set_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism.lab.tasks.catalogue import TASKS

    monkeypatch.setitem(TASKS, "recall", "mqar:Recall")
    for item, sentence in (
        ("pairs", "--set 'pairs' must look like name=value"),
        ("model.width=3", "--set 'model.width=3' must look like"),
        ("budget.widht=3", "budget.widht that does not exist (did you mean budget.width?)"),
        ("budget.foo=3", "budget.foo that does not exist: choose from steps, tokens, batch"),
        (
            "pars=3",
            "has a setting pars that does not exist (did you mean pairs?): choose from pairs, length, vocabulary",
        ),
    ):
        assert main(["probe", "recall", "--set", item, "--output", str(tmp_path / "out")]) == 2
        assert sentence in capsys.readouterr().err


def test_a_failed_run_is_said_and_gives_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism.lab.tasks.catalogue import TASKS

    monkeypatch.setitem(TASKS, "recall", "mqar:Recall")
    words = ["probe", "recall", *SMALL, "--rules", "linear", "--learning-rates", "1e30"]
    words += [
        "--set",
        "pairs=2",
        "length=8",
        "vocabulary=16",
        "budget.clip=1e30",
        *SETS,
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(words) == 1
    assert "2 runs failed, the first with FloatingPointError" in capsys.readouterr().out


def test_a_run_that_time_has_stopped_has_not_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is under way when the minutes are over."""
    plan, out = tmp_path / "recall.toml", tmp_path / "out"
    plan.write_text(howto_plan())

    def stopped(entries: Any, records: Records, *given: Any) -> int:
        with records.writing():
            records.add(entries[0].search()[0], "stopped", error="5 minutes were over")
        return 1

    monkeypatch.setattr(command, "run_grid", stopped)
    assert main(["compare", str(plan), "--out", str(out), "--minutes", "5"]) == 0
    said = capsys.readouterr().out
    assert "stopped after 5 minutes with 1 run to go: the same command continues" in said
    assert "failed" not in said and "--retry" not in said


def test_one_failed_run_among_finished_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "recall.toml"
    plan.write_text(howto_plan())

    def diverged(entries: Any, records: Records, *given: Any) -> int:
        with records.writing():
            for entry in entries[:2]:
                for training in (*entry.search(), *entry.final(1e-2)):
                    score = float("nan") if training.name == entries[1].final(1e-2)[2].name else 0.5
                    about = {"better": "higher", "metric": "accuracy", "seconds": 1.0}
                    scores = {"6 pairs": score} if training.settings["test"] else {}
                    good = training.settings["learning_rate"] == 1e-2
                    records.add(training, "done", result={"scores": scores, "validation": float(good), **about})
        return 0

    monkeypatch.setattr(command, "run_grid", diverged)
    assert main(["compare", str(plan), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "1 run failed, the first with FloatingPointError: the training diverged" in said
    assert "--retry repeats it" in said and "2 of 3, 1 failed" in said and "(2 of 3 seeds)" in said
    assert "no verdict, because seed 2 of linear failed" in said
