"""Rules from outside the package work in every command: by --import, by a plan, and by an entry point."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from prism import rules
from prism.cli import main
from prism.rules.outside import VARIABLE, import_modules
from tests.tiny_lm import save_lm

MODULE = """
import prism
from prism.rules.delta import Delta


class Turned(Delta):
    def update(self, x, carry, span):
        return super().update(-x, carry, span)
"""
REGISTER = "prism.rules.register('turned', Turned)"
SMALL = ["--steps", "2", "--seeds", "1", "--width", "16", "--batch", "4", "--jobs", "1", "--device", "cpu", "--set"]
SETS = ["budget.validation_sequences=8", "budget.test_sequences=8", "budget.evaluations=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the module; what a command adds to the process ends with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(rules, "_REGISTERED", {})
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "turned_rule.py").write_text(MODULE + REGISTER)
    yield tmp_path
    sys.modules.pop("turned_rule", None)


def package(folder: Path, target: str) -> None:
    """An installed package with an entry point `turned`."""
    info = folder / "turned-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[prism.rules]\nturned = {target}\n")
    sys.path.insert(0, str(folder))
    assert "turned" in entry_points(group="prism.rules").names


def trained_rules(results: Path) -> set[str]:
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert {line["status"] for line in lines} == {"started", "done"}
    return {line["rule"] for line in lines}


def test_workers_of_a_probe_import_the_module() -> None:
    words = ["probe", "parity", "--rules", "turned", "--learning-rates", "1e-2", "--output", "out", *SMALL, *SETS]
    assert main([*words, "--import", "turned_rule"]) == 0
    assert trained_rules(Path("out/results.jsonl")) == {"turned"}


def test_a_plan_imports_a_module_for_its_workers() -> None:
    Path("plan.toml").write_text(
        """
        imports = ["turned_rule"]
        rules = ["turned", "delta"]
        device = "cpu"
        jobs = 1
        budget = { steps = 1, batch = 4, width = 16, validation_sequences = 8, test_sequences = 8, evaluations = 1 }
        tasks = [{ task = "parity" }]
        """
    )
    assert main(["compare", "plan.toml", "--out", "out"]) == 0
    assert trained_rules(Path("out/results.jsonl")) == {"turned", "delta"}


def test_a_saved_model_with_it_is_opened(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import_modules(["turned_rule"])
    model = str(save_lm(Path("model"), "turned+delta"))
    capsys.readouterr()
    monkeypatch.setattr(rules, "_REGISTERED", {})
    monkeypatch.setenv(VARIABLE, "")
    sys.modules.pop("turned_rule")
    words = ["generate", model, "--prompt", "a", "--max-new-tokens", "3", "--device", "cpu"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "unknown rule 'turned'" in error and "--import MODULE" in error and error.count("\n") == 1
    assert main(["--import=turned_rule", *words]) == 0
    assert capsys.readouterr().out


def test_an_entry_point_is_found_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "turned_rule.py").write_text(MODULE)
    package(folder, "turned_rule:Turned")
    assert "turned" in rules.names() and "turned_rule" not in sys.modules
    assert main(["rules", "turned"]) == 0
    assert rules.get("turned").__name__ == "Turned" and "turned" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["no_such_module:Turned", "turned_rule:Other", "json:loads"])
def test_a_broken_entry_point_is_one_sentence(folder: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    package(folder, target)
    assert main(["rules", "turned"]) == 2
    error = capsys.readouterr().err
    assert "'turned'" in error and "package turned" in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["import no_such_module", "1 +", "raise KeyError('a\\nb')", "prism"])
def test_a_module_that_cannot_be_imported_is_one_sentence(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("turned_rule.py").write_text(text)
    assert main(["rules", "--import", "turned_rule"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prism rules: --import turned_rule failed with ") and error.count("\n") == 1


def test_a_flag_without_a_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["rules", "--import"], ["--import", "--width", "rules"], ["rules", "--import="]):
        with pytest.raises(SystemExit):
            main(words)
        assert "--import needs the name of a module" in capsys.readouterr().err
