"""`prism demo` from end to end, with as little training as it takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prism.cli import main
from prism.cli.demo import MARK, MODELS, _affordable, _check_output, _side_by_side


def test_steps_fit_into_the_time() -> None:
    assert _side_by_side([3.0, 2.0, 1.5], workers=2) == 3.5
    assert _side_by_side([3.0, 2.0, 1.5], workers=9) == 3.0
    assert _side_by_side([3.0, 2.0, 1.5], workers=1) == 6.5
    costs = [0.2, 0.1, 0.1]
    for seconds in (60, 600):
        steps = _affordable(costs, seconds)
        assert steps * _side_by_side(costs, os.cpu_count() or 1) < seconds < 1.5 * steps * sum(costs) * 1.25
    assert _affordable(costs, -5.0) == 40


@pytest.mark.parametrize("name", ["report.html", "results.json", "notes.txt", "prism/mine.txt"])
def test_files_of_others_are_not_replaced(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "holds what no demo wrote" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_run_of_somebodys_own_is_not_taken_for_the_demos(tmp_path: Path) -> None:
    (tmp_path / "prism").mkdir()
    (tmp_path / "prism" / "config.json").write_text('{"task": "lm", "settings": {}}')
    with pytest.raises(ValueError, match="holds what no demo wrote"):
        _check_output(tmp_path)
    (tmp_path / MARK).touch()  # what an interrupted demo left is its own
    _check_output(tmp_path)


def test_no_time_at_all_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--minutes", "0", "--output", str(tmp_path)]) == 2
    assert "minutes must be above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_writes_its_report_and_can_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    for _ in range(2):  # --minutes leaves no time at all: the least number of steps is taken
        assert main(["demo", "--minutes", "0.01", "--recall-steps", "2", "--output", str(out)]) == 0
    report = (out / "report.html").read_text(encoding="utf-8")
    assert str((out / "report.html").resolve()) in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())["results"]
    assert [model["name"] for model in results["models"]] == list(MODELS)
    assert {model["steps"] for model in results["models"]} == {40}
    for rule, model in zip(MODELS.values(), results["models"], strict=True):
        assert (out / rule / "model" / "model.safetensors").is_file()
        assert model["command"] in report
    assert main(["demo", "--output", str(tmp_path / "demo" / "report.html")]) == 2
