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
    assert main(["probe", "mqar", *arguments, "--seeds", "1", "--output", str(tmp_path / "out")]) == 0
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["name"] for result in saved["results"]] == ["linear", "prism:steps=1"]
    assert saved["machine"]["torch"]
    assert saved["results"][0]["seed"] == 0
    assert (tmp_path / "out" / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert "recall.png" in capsys.readouterr().out


def test_several_seeds_are_shown_with_their_error_and_paired_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """linear reaches .2, .4, .6; gla always .1 more, so that the paired difference has no error; delta is at chance."""
    gains = {"linear": 0.0, "gla": 0.1, "delta": 0.05}

    def trained(
        runs: list[Any], names: list[str], steps: list[int], jobs: int | None, keep: Callable[..., None]
    ) -> None:
        found = []
        for one in runs:
            accuracy = 0.2 + 0.2 * one.run.seed + gains[one.label]
            accuracy += 0.1 * (-1) ** one.run.seed if one.label == "delta" else 0.0
            sizes = {"key_dim": one.run.model.key_dim, "state_size": 512, "parameters": 9, "task": {"pairs": 8}}
            by_pairs = dict.fromkeys(one.test_pairs, accuracy)
            found.append(
                {"name": one.label, "seed": one.run.seed, "accuracy": accuracy, "accuracy_by_pairs": by_pairs, **sizes}
            )
        keep(found)

    monkeypatch.setattr(probe, "run_jobs", lambda train, *given: trained(*given))
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--rules", "linear", "gla", "delta", "--setting", "easy", "--output", str(tmp_path / "out")]
    assert main(["probe", "mqar", *arguments]) == 0
    said = capsys.readouterr().out
    assert "0.400 ± 0.115" in said and "0.500 ± 0.115" in said and "+0.100 ± 0.000 *" in said
    assert "easy, gla: better than linear by 0.100 ± 0.000, beyond two standard errors (3 seeds)" in said
    assert "easy, delta: +0.083 ± 0.067 against linear, within two standard errors (3 seeds)" in said


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
    words = ["probe", "mqar", "--rules", "linear", "delta", "--setting", "easy", "--steps", "2", "--seeds", "1"]
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
