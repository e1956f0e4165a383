"""`prism demo` from end to end, with as little training as it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.cli import demo, main
from prism.cli.demo import MARK, MODELS, _check_output, steps_for


@given(st.floats(0.01, 1000), st.floats(0.01, 1000))
def test_steps_follow_from_the_minutes_alone(minutes: float, more: float) -> None:
    assert 40 <= steps_for(minutes) <= steps_for(minutes + more) <= 40 + 90 * (minutes + more)
    assert steps_for(5.0) == 450


def test_neither_clock_nor_load_decides_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def stop(function: object, jobs: object, names: object, steps: list[int]) -> None:
        asked.append(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "mqar", lambda *rules, **options: None)
    monkeypatch.setattr(demo, "run_jobs", stop)
    for slow in (1.0, 1000.0):
        seconds = iter(range(10_000))
        monkeypatch.setattr(demo.time, "perf_counter", lambda slow=slow, seconds=seconds: slow * next(seconds))
        assert main(["demo", "--minutes", "2", "--output", str(tmp_path)]) == 130
    assert asked == [[180] * 3] * 2


@pytest.mark.parametrize("name", ["report.html", "results.json", "notes.txt", "prism/mine.txt"])
def test_files_of_others_are_not_replaced(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "holds files that no demo wrote" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_run_of_another_command_is_not_taken_for_a_demo(tmp_path: Path) -> None:
    (tmp_path / "prism").mkdir()
    (tmp_path / "prism" / "config.json").write_text('{"task": "lm", "settings": {}}')
    with pytest.raises(ValueError, match="holds files that no demo wrote"):
        _check_output(tmp_path)
    (tmp_path / MARK).touch()  # what an interrupted demo left is its own
    _check_output(tmp_path)


def test_no_time_at_all_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--minutes", "0", "--output", str(tmp_path)]) == 2
    assert "minutes must be above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_writes_its_report_and_can_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, seen = tmp_path / "demo", []
    for _ in range(2):  # so few minutes that the least number of steps is taken
        assert main(["demo", "--minutes", "0.01", "--recall-steps", "2", "--output", str(out)]) == 0
        models = json.loads((out / "results.json").read_text())["results"]["models"]
        seen.append(
            [(m["sample"], [(r.get("loss"), r.get("validation_bits_per_byte")) for r in m["log"]]) for m in models]
        )
    assert seen[0] == seen[1]
    report = (out / "report.html").read_text(encoding="utf-8")
    assert str((out / "report.html").resolve()) in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())["results"]
    assert [model["name"] for model in results["models"]] == list(MODELS)
    assert {model["steps"] for model in results["models"]} == {40}
    for rule, model in zip(MODELS.values(), results["models"], strict=True):
        assert (out / rule / "model" / "model.safetensors").is_file()
        assert model["command"] in report
    assert main(["demo", "--output", str(tmp_path / "demo" / "report.html")]) == 2
