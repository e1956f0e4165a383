"""`prism probe mqar`: results and a picture; nothing is trained when a rule or option is wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prism.cli import main, probe
from prism.cli.probe import train_recall
from prism.compare.plan import parse_rule
from prism.probes.catalogue import TASKS
from prism.probes.jobs import run_jobs


def test_a_rule_with_options_is_parsed() -> None:
    assert parse_rule("prism:steps=3,preset=paper,gain=False") == (
        "prism",
        {"steps": 3, "preset": "paper", "gain": False},
    )
    with pytest.raises(ValueError, match="name=value"):
        parse_rule("prism:steps")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--jobs", "-1"], "jobs must be at least 1, got -1"),
        (["--key-dim", "8", "0"], "key_dim must be at least 1, got 0"),
        (["--rules"], "rules is empty: name one or more of prism, "),
        (["--rules", "prism:heads=3"], "rule 'prism' has no option 'heads'; it takes preset, "),
    ],
)
def test_numbers_and_options_that_no_probe_can_have(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "mqar", "--output", str(tmp_path / "out"), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_writes_results_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rules", "linear", "prism:steps=1", "--setting", "easy", "--steps", "2", "--jobs", "1"]
    assert main(["probe", "mqar", *arguments, "--output", str(tmp_path / "out")]) == 0
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["name"] for result in saved["results"]] == ["linear", "prism:steps=1"]
    assert saved["machine"]["torch"]
    assert saved["results"][0]["seed"] == 0
    assert (tmp_path / "out" / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert "recall.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "expected"), [("prsm", "prism"), ("prism:stepz=2", "stepz"), ("prism:steps=0", "steps")]
)
def test_a_wrong_rule_is_told_before_anything_is_trained(
    rule: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "mqar", "--rules", rule, "--output", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        *_, keep = arguments
        keep([None, train_recall(arguments[1][1])])
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "run_jobs", interrupted)
    words = ["probe", "mqar", "--rules", "linear", "delta", "--setting", "easy", "--steps", "2"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 130
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["name"] for result in saved["results"]] == ["delta"]


def test_results_come_in_order_and_as_they_are_ready() -> None:
    seen: list[list[Any]] = []
    results = run_jobs(square, [3, 1, 2], ["a", "b", "c"], [1, 1, 1], 1, lambda found: seen.append(list(found)))
    assert results == seen[-1] == [9, 1, 4]
    assert all(None in found for found in seen[:-1])


def test_one_job_that_fails_does_not_cost_the_others_results() -> None:
    seen: list[list[Any]] = []
    with pytest.raises(ValueError, match="not a number"):
        run_jobs(square, [3, None], ["a", "b"], [1, 1], 1, lambda found: seen.append(list(found)))
    assert seen[-1] == [9, None]


def square(number: int | None, report: Callable[[int, float], None]) -> int:
    report(1, 0.0)
    if number is None:
        raise ValueError("not a number")
    return number**2


def test_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", "--help"])
    words = re.findall(r"\w+", capsys.readouterr().out)
    assert set(TASKS) <= set(words)
