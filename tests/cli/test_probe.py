"""`prism probe mqar`: the engine of `prism compare` in named settings; results are kept and drawn, mistakes said first."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prism.cli import main, probe_mqar
from prism.cli.compare import run_plan
from prism.cli.probe_mqar import SETTINGS, recall_results
from prism.lab import jobs, results
from prism.lab.jobs import run_jobs
from prism.lab.plan import Plan, parse_rule
from prism.lab.probe import ProbeRun
from prism.lab.tasks.catalogue import TASKS
from prism.lab.tasks.mqar import PRESETS

SMALL = ["--steps", "2", "--jobs", "1", "--device", "cpu", "--set", "budget.width=16", "budget.batch=4"]
SMALL += ["budget.validation_sequences=8", "budget.test_sequences=8"]


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "START", "fork")


def finished(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in lines if line["status"] == "done"]


def planned(monkeypatch: pytest.MonkeyPatch, *words: str) -> Plan:
    """The plan that the command makes of its words."""
    plans: list[Plan] = []

    def keep(plan: Plan, *arguments: Any, **options: Any) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(probe_mqar, "run_plan", keep)
    assert main(["probe", "mqar", "--dry-run", *words]) == 0
    return plans[0]


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
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--pairs", "0"], "--pairs must be at least 1, got 0"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--jobs", "-1"], "--jobs must be at least 1, got -1"),
        (["--learning-rates", "1e-3", "-1"], "--learning-rates must be above 0, got -1"),
        (["--key-dim", "8", "0"], "--key-dim must be at least 1, got 0"),
        (["--rules"], "--rules is empty: name one or more of prism, "),
        (["--rules", "prsm"], "did you mean 'prism'?"),
        (["--rules", "prism:steps=0"], "steps must be"),
        (["--rules", "prism:heads=3"], "rule 'prism' has no option 'heads'; it takes preset, "),
        (["--setting"], "--setting is empty: name one or more of easy, starved, zoology-64, "),
        (["--setting", "easi"], "--setting 'easi' is unknown (did you mean 'easy'?): choose from easy, starved, "),
        (["--pairs", "64"], "--setting easy: vocabulary must be ≥ 130 for 64 pairs, got 128 (--set name=value changes"),
        (["--set", "pears=2"], "pears that does not exist (did you mean pairs?)"),
        (["--set", "budget.widht=2"], "budget.widht that does not exist"),
    ],
)
def test_numbers_and_options_that_no_probe_can_have(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "mqar", "--output", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_every_preset_is_a_setting_that_the_help_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(SETTINGS) == list(PRESETS)
    with pytest.raises(SystemExit):
        main(["probe", "mqar", "--help"])
    assert set(SETTINGS) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


def test_settings_have_budgets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, "--rules", "linear", "--seeds", "2", "--setting", *SETTINGS)
    assert plan.tasks == list(PRESETS)
    for entry in plan.entries:
        run, task = ProbeRun.from_plain(entry.final(entry.rates.values[0])[1].settings), PRESETS[entry.task]
        assert run.build_task() == task and list(run.build_tests()) == [
            f"pairs={n}" for n in (task.pairs, *task.test_pairs)
        ]
        assert len(task.test_pairs) == 3
    small = {(e.task, e.steps, e.settings["batch"], e.settings["model"]["key_dim"]) for e in plan.entries[:2]}
    assert small == {("easy", 600, 64, 16), ("starved", 900, 32, 8)}
    assert {e.rates.values for e in plan.entries[:2]} == {(1e-2,)} and {e.seeds for e in plan.entries} == {(0, 1)}


def test_a_setting_is_the_same_next_to_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(*settings: str) -> dict[str, Any]:
        plan = planned(monkeypatch, "--rules", "gated_delta", "--setting", *settings)
        return {entry.task: entry for entry in plan.entries}

    every = entries(*SETTINGS)
    assert every == entries(*reversed(SETTINGS))
    assert all(every[name] == entries(name)[name] for name in SETTINGS)


def test_tokens_go_before_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = planned(monkeypatch, "--rules", "linear", "--setting", "easy", "--set", "budget.tokens=20480").entries
    assert entry.steps == 20480 // (64 * 32)


def test_set_goes_before_flags_and_flags_before_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rules", "linear", "--steps", "7", "--layers", "2", "--key-dim", "4", "--pairs", "20"]
    words += [
        "--learning-rates",
        "1e-3",
        "1e-2",
        "--set",
        "vocabulary=64",
        "budget.layers=3",
        "learning_rate.seeds=[9]",
    ]
    for entry in planned(monkeypatch, *words).entries:
        run = ProbeRun.from_plain(entry.search()[0].settings)
        assert (entry.steps, run.model.layers, run.model.key_dim, entry.rates.seeds) == (7, 3, 4, (9,))
        assert entry.rates.values == (1e-3, 1e-2) and run.task_options["vocabulary"] == 64
        assert run.task_options["length"] == 80 and list(run.build_tests()) == [f"pairs={n}" for n in (20, 5, 10, 15)]


def test_another_command_in_the_same_folder_adds_to_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--output", str(tmp_path / "out")]
    assert main(["probe", "mqar", "--rules", "linear", "delta", "--seeds", "2", *out, *SMALL]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("ceiling", "baseline", "pairs=12", "2 seeds are too few", "recall.png"))
    first = finished(tmp_path / "out")
    assert {(line["task"], line["rule"], line["seed"]) for line in first} == {
        (task, rule, seed) for task in ("easy", "starved") for rule in ("linear", "delta") for seed in (0, 1)
    }
    assert list(first[0]["result"]["scores"]) == ["pairs=8", "pairs=2", "pairs=4", "pairs=6"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "ceiling" in page and "training loss" in page
    assert main(["probe", "mqar", "--rules", "linear", "--setting", "easy", "--seeds", "1", *out, *SMALL]) == 0
    assert finished(tmp_path / "out") == first, "nothing is repeated, nothing is lost"
    assert (tmp_path / "out" / "recall.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_leaves_what_was_trained_and_the_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["probe", "mqar", "--rules", "linear", "--setting", "easy", "--seeds", "2", "--output", str(out), *SMALL]

    def interrupted(plan: Plan, *arguments: Any, **options: Any) -> int:
        run_plan(plan, out, jobs=1, seeds=(1,))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(probe_mqar, "run_plan", interrupted)
        assert main(words) == 130
    kept = finished(out)
    assert [line["seed"] for line in kept] == [1] and (out / "recall.png").exists()
    assert main(words) == 0
    assert [line["seed"] for line in finished(out)] == [1, 0] and finished(out)[:1] == kept


def line(rule: str, state_size: int, accuracy: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    by_pairs = {"pairs=4": accuracy, "pairs=2": 1.0}
    about = {"status": "done", "phase": "final", "task": "easy", "rule": rule, "seed": seed, "state_size": state_size}
    result = {"scores": by_pairs, "baseline": {"pairs=4": 0.25, "pairs=2": 0.5}}
    settings = {"steps": 9, "task_options": {"pairs": 4}, "model": {"rule": rule}}
    return {**about, "settings": settings, "result": result, **more}


def test_finished_final_models_are_shown_and_sizes_told_apart() -> None:
    lines = [line("linear", 512, 0.5), line("delta", 512, 0.75), line("delta", 512, 0.9, phase="search")]
    assert [(r["name"], r["accuracy"]) for r in recall_results(lines)] == [("linear", 0.5), ("delta", 0.75)]
    lines += [line("linear", 1024, 0.6), line("delta", 1024, 0.0, status="started")]
    found = recall_results(lines)
    assert [r["name"] for r in found] == ["linear, 512", "delta, 512", "linear, 1,024"]
    assert found[0]["accuracy_by_pairs"] == {4: 0.5, 2: 1.0} and found[0]["task"]["pairs"] == 4


def test_the_picture_has_a_panel_for_each_setting_with_means_ranges_and_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(results, "save", lambda figure, path: figures.append(figure))
    settings = ("easy", "starved", "zoology-64", "zoology-128")
    lines = [line("linear", 512, 0.25 + 0.5 * seed, seed, task=task) for task in settings for seed in (0, 1)]
    lines.append(line("softmax", 16, 1.0, task="easy"))  # the size of a token, not of the memory
    results.recall_picture(recall_results(lines), tmp_path / "recall.png")
    axes = [axis for axis in figures[0].axes if axis.get_visible()]
    assert [axis.get_title() for axis in axes] == [f"{name}: 512 numbers of memory" for name in settings]
    mean, baseline = axes[3].lines
    assert mean.get_xydata().tolist() == [[2, 1.0], [4, 0.5]]
    assert baseline.get_xydata().tolist() == [[2, 0.5], [4, 0.25]]
    band = axes[3].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.25, 1.0)


def test_results_come_in_order_and_an_error_is_raised() -> None:
    assert run_jobs(square, [3, 1, 2], ["a", "b", "c"], [1, 1, 1]) == [9, 1, 4]
    with pytest.raises(ValueError, match="not a number"):
        run_jobs(square, [3, None], ["a", "b"], [1, 1])


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
