"""`prism probe mqar`: results and a picture; nothing is trained when a rule or option is wrong."""

import json
from pathlib import Path

import pytest

from prism.cli import main
from prism.cli.probe import parse_rule
from prism.evaluate.recall import RecallRun, train_recall


def test_a_rule_with_options_is_parsed() -> None:
    assert parse_rule("prism:steps=3,preset=paper,gain=False") == (
        "prism",
        {"steps": 3, "preset": "paper", "gain": False},
    )
    with pytest.raises(ValueError, match="name=value"):
        parse_rule("prism:steps")


def test_training_recalls_better_than_chance() -> None:
    from prism.data.mqar import Recall

    run = RecallRun("gated_delta", Recall(2, 8, 16), layers=1, width=32, key_dim=8, steps=150, batch=32)
    result = train_recall(run)
    assert result["accuracy"] > 0.5  # chance: 1 of 8 values
    assert result["state_size"] == 8 * 32


def test_the_command_writes_results_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rules", "linear", "prism:steps=1", "--setting", "easy", "--steps", "2", "--jobs", "1"]
    assert main(["probe", "mqar", *arguments, "--output", str(tmp_path / "out")]) == 0
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["name"] for result in saved["results"]] == ["linear", "prism:steps=1"]
    assert saved["machine"]["torch"]
    assert saved["results"][0]["seed"] == 0
    assert (tmp_path / "out" / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert "recall.png" in capsys.readouterr().out


@pytest.mark.parametrize(("rule", "told"), [("prsm", "prism"), ("prism:stepz=2", "stepz"), ("prism:steps=0", "steps")])
def test_a_wrong_rule_is_told_before_anything_is_trained(
    rule: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "mqar", "--rules", rule, "--output", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
