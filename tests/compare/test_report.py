"""The report: scores, differences and failures of a results file, on a page that needs nothing else, and as pictures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from prism.compare import report as module
from prism.compare.entries import Entry, Rates
from prism.compare.findings import Findings, findings, verdict
from prism.compare.grid import Records
from prism.compare.plan import Plan
from prism.compare.report import CHARTS, by_label, by_state, number, write_report
from prism.compare.statistics import Estimate

RATES = Rates((1e-3, 1e-2, 1e-1), (100,))
SCORES = {"base": [0.5, 0.7, 0.6], "better": [0.8, 0.9, 0.85], "<same>": [0.6, 0.6, 0.6]}


def entry(rule: str, size: int = 0, grows: bool = False) -> Entry:
    return Entry(
        "recall", rule, "m:f", {"rule": rule, "size": size}, 10, (0, 1, 2), RATES, 1000, 64 * 2**size, grows, size
    )


def result(score: float, better: str = "higher") -> dict[str, Any]:
    return {
        "metric": "accuracy",
        "better": better,
        "validation": score,
        "scores": {"length=16": score, "length=64": score / 2},
        "ceiling": {"length=16": 1.0, "length=64": 1.0},
        "baseline": {"length=16": 0.1, "length=64": 0.1},
        "curve": [{"step": s, "tokens": 10 * s, "seconds": s / 5, "loss": 1 / s} for s in (1, 2, 3)],
        "parameters": 1000,
        "state_size": 64,
        "seconds": 3.0,
    }


@pytest.fixture
def found(tmp_path: Path) -> Findings:
    entries = tuple(entry(rule, size) for size in (0, 1) for rule in SCORES)
    plan = Plan("A title & more", "base", 1, entries)
    records = Records(tmp_path / "results.jsonl")
    with records.writing():
        for one in entries:
            for training in one.search():
                rate = training.about["learning_rate"]
                if rate == 1e-1:
                    records.add(training, "failed", error="FloatingPointError: too fast", details="")
                else:
                    records.add(training, "done", result=result(10 * rate + 0.1), command="prism compare x.toml")
            for training, score in zip(one.final(1e-2), SCORES[one.rule], strict=True):
                records.add(training, "done", result=result(score + 0.05 * one.size), command="prism compare x.toml")
    return findings(plan, Records(records.path))


def test_findings_are_those_of_the_file(found: Findings) -> None:
    base, better, same = found.found[:3]
    assert base.rate == 1e-2 and base.labels == ["length=16", "length=64"]
    assert base.score("length=16").mean == pytest.approx(0.6)
    assert found.reference(base) is None and found.reference(better) is base
    assert found.reference(found.found[4]) is found.found[3], "compared at the same size"
    gain = better.difference(base, "length=16")  # .3, .2, .25
    assert gain.mean == pytest.approx(0.25) and gain.error == pytest.approx(0.05 / 3**0.5) and gain.significant
    assert not same.difference(base, "length=16").significant
    assert found.sentences()[0] == (
        "recall, better, state 64: better than base by 0.250 ± 0.029, beyond two standard errors (3 seeds)"
    )
    assert found.sentences()[1].endswith("+0.000 ± 0.058 against base, within two standard errors (3 seeds)")
    assert [line["error"] for line in base.failures] == ["FloatingPointError: too fast"]
    assert not base.at_edge and found.commands == ["prism compare x.toml"]


def test_a_report_names_the_commands_and_machines_of_its_own_runs(tmp_path: Path) -> None:
    """The file also has a run of another plan, and the report may be written on another machine."""
    one, other = entry("base"), entry("other")
    records = Records(tmp_path / "results.jsonl")
    with records.writing():
        for which, name in ((one, "this"), (other, "another")):
            for training in (*which.search(), *which.final(1e-2)):
                about = {"command": f"prism compare {name}.toml", "machine": {"gpu": f"{name} GPU", "cores": 3}}
                records.add(training, "done", result=result(training.about["learning_rate"] == 1e-2), **about)
    text = write_report(findings(Plan("", "base", 1, (one,)), records), tmp_path / "out").read_text()
    assert "prism compare this.toml" in text and "<dd>gpu this GPU, cores 3</dd>" in text
    assert "another" not in text


@pytest.mark.parametrize(
    ("mean", "lower", "words"),
    [(0.5, False, "better than"), (-0.5, False, "worse than"), (0.5, True, "worse than"), (-0.5, True, "better than")],
)
def test_better_is_lower_for_a_loss(mean: float, lower: bool, words: str) -> None:
    assert verdict(Estimate(mean, 0.1, 3), "base", lower).startswith(f"{words} base by 0.500 ± 0.100")
    assert verdict(Estimate(mean, float("nan"), 1), "base", lower).endswith("; 1 seed is too few for a verdict")
    assert verdict(Estimate(mean, 0.01, 2), "base", lower).endswith("; 2 seeds are too few for a verdict")


@pytest.mark.parametrize(("baseline", "at_chance"), [(0.1, False), (0.84, True), (0.9, True)])
def test_scores_at_the_baseline_are_said_to_be_at_chance(found: Findings, baseline: float, at_chance: bool) -> None:
    """The better score is 0.850 ± 0.029."""
    for finding in found.found:
        for run in finding.runs.values():
            run["baseline"] = {"length=16": baseline}
    said = found.sentences()[0]
    assert ("both are at chance: the better score, 0.850 ± 0.029, is not above the baseline of" in said) == at_chance


class _Page(HTMLParser):
    """Tags that are open, and everything that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "circle", "rect", "br"):
            self.open.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "circle", "rect"):
            assert self.open.pop() == tag


def test_the_page_holds_every_figure_and_loads_nothing(found: Findings, tmp_path: Path) -> None:
    text = write_report(found, tmp_path / "out").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == [] and page.loads == []
    assert "A title &amp; more" in text and "&lt;same&gt;" in text and "<same>" not in text
    flat = re.sub(r"<[^>]+>", "", text)
    for fact in (
        "0.600 ± 0.058",
        "+0.250 ± 0.029 *",
        "too fast",
        "$ prism compare x.toml",
        "1,000",
        "ceiling",
        "baseline",
    ):
        assert fact in flat, fact
    for name in CHARTS:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_curves_are_by_length_and_by_state(found: Findings) -> None:
    assert [point[0] for point in by_label(found, "recall")["better, 64"]] == [16.0, 64.0]
    curve = by_state(found, "recall")["better"]
    assert [(x, round(y, 3)) for x, y, _ in curve] == [(64, 0.85), (128, 0.9)]
    tokens = CHARTS["loss-by-tokens"][2](found, "recall")["base"]
    assert [(x, y) for x, y, _ in tokens] == [(10, 1.0), (20, 0.5), (30, pytest.approx(1 / 3))]


def test_collected_results_have_no_curves_of_the_loss(found: Findings, tmp_path: Path) -> None:
    for finding in found.found:
        for run in finding.runs.values():
            del run["curve"]  # experiments/collect.py leaves it out
    write_report(found, tmp_path)
    assert not (tmp_path / "loss-by-tokens.png").exists() and (tmp_path / "score-by-length.png").exists()


def test_what_has_no_curve_has_no_picture(found: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "score-by-state.png").write_text("old")
    one = Findings(found.plan, found.found[:3], [])
    drawn: list[str] = []
    monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(path.stem))
    write_report(one, tmp_path)
    assert "score-by-state" not in drawn and not (tmp_path / "score-by-state.png").exists()
    assert "score-by-length" in drawn


@pytest.mark.parametrize(
    ("label", "expected"), [("length=64", 64), ("40-256", 256), ("2 pairs", 2), ("", None), ("a", None)]
)
def test_numbers_in_labels(label: str, expected: float | None) -> None:
    assert number(label) == expected
