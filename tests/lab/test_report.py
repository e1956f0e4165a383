"""The report: scores, differences and failures of a results file, on a page that needs nothing else, and as pictures."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prism.cli.compare import _fitting
from prism.lab import report as module
from prism.lab.curves import CHARTS, by_label, by_position, by_state, number
from prism.lab.entries import Entry, Rates
from prism.lab.findings import LAMBADA, Findings, findings, verdict
from prism.lab.grid import Records
from prism.lab.plan import Plan
from prism.lab.report import shared_settings, write_report
from prism.lab.statistics import Estimate

RATES = Rates((1e-3, 1e-2, 1e-1), (100,))
SCORES = {"base": [0.5, 0.7, 0.6], "better": [0.8, 0.9, 0.85], "<same>": [0.6, 0.6, 0.6]}


def entry(rule: str, size: int = 0, grows: bool = False, rates: Rates = RATES, seeds: int = 3) -> Entry:
    given, every = {"rule": rule, "size": size}, tuple(range(seeds))
    return Entry("recall", rule, "m:f", given, 10, every, rates, 1000, 64 * 2**size, grows, size)


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
        "recall, better, state 64: better than base by 0.250 ± 0.029, significant (3 seeds)"
    )
    assert found.sentences()[1].endswith("+0.000 ± 0.058 against base, not significant (3 seeds)")
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


@pytest.mark.parametrize(("baseline", "at_chance"), [(0.1, False), (0.895, True), (0.9, True)])
def test_scores_at_the_baseline_are_said_to_be_at_chance(found: Findings, baseline: float, at_chance: bool) -> None:
    """The better score is 0.850 ± 0.029."""
    for finding in found.found:
        for run in finding.runs.values():
            run["baseline"] = {"length=16": baseline}
    said = found.sentences()[0]
    assert (
        "both are at chance: the better score, 0.850 ± 0.029, is not better than the baseline of" in said
    ) == at_chance
    assert said.startswith(
        "recall, better, state 64: "
        + ("+0.250 ± 0.029 against base; both" if at_chance else "better than base by 0.250")
    )
    better, base = found.found[1], found.found[0]
    assert better.difference_text(base, "length=16") == f"+0.250 ± 0.029{'' if at_chance else ' *'}"


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([0.10, 0.11, 0.09], "both are at chance"),
        ([1.0, 0.1, 0.1], "2 of 3 seeds of better do not learn the task"),
        ([1.0, 0.75, 0.1], "1 of 3 seeds of better does not learn the task"),
        ([0.1, 0.3, 0.1], "not significant (3 seeds)"),  # neither at chance nor learned
        ([1.0, 0.9, 0.8], "significant (3 seeds)"),
    ],
)
def test_a_seed_that_learned_is_no_guess(scores: list[float], said: str, tmp_path: Path) -> None:
    """Of rules that solve a task with some seeds the mean is not above the baseline by its own error."""
    found = of_scores(tmp_path / "results.jsonl", {"base": [0.1, 0.11, 0.1], "better": [*scores]})
    assert found.sentences()[0].endswith(said) or said in found.sentences()[0]


def of_scores(path: Path, scores: dict[str, list[float | None]], **more: Any) -> Findings:
    """Findings of rules whose seeds have these scores; None: the run is yet to come."""
    rates = Rates((1e-2,))
    entries = tuple(entry(rule, rates=rates, seeds=len(found)) for rule, found in scores.items())
    records = Records(path)
    with records.writing():
        for one in entries:
            for training, score in zip(one.final(1e-2), scores[one.rule], strict=True):
                if score is not None:
                    records.add(training, "done", result={**result(score), **more})
    return findings(Plan("", "base", 1, entries), records)


@pytest.mark.parametrize(("side", "which"), [("base", "seed 3 of base"), ("better", "seed 3 of better")])
def test_a_seed_without_a_score_is_shown_and_no_verdict_is_given(tmp_path: Path, side: str, which: str) -> None:
    scores: dict[str, list[float | None]] = {"base": [0.5, 0.6, 0.55, 0.5], "better": [0.8, 0.9, 0.85, 0.8]}
    scores[side][3] = math.nan
    found = of_scores(tmp_path / "results.jsonl", scores)
    (said,) = found.sentences()
    assert (
        said == f"recall, better, state 64: +0.300 ± 0.000 against base (3 seeds); no verdict, because {which} failed"
    )
    finding = next(f for f in found.found if f.entry.rule == side)
    assert finding.lost == [3] and finding.seeds == "3 of 4, 1 failed"
    assert finding.score_text("length=16").endswith(" (3 of 4 seeds)")
    text = re.sub(r"<[^>]+>", "", write_report(found, tmp_path / "out").read_text())
    assert "(3 of 4 seeds)" in text and "3 of 4, 1 failed" in text and "+0.300 ± 0.000" in text
    assert "+0.300 ± 0.000 *" not in text and "the training diverged" in text


def test_a_test_that_a_seed_has_no_score_of_gets_no_star(tmp_path: Path) -> None:
    """The main score is finite: the run has not failed, and the verdict on it stands."""
    found = of_scores(tmp_path / "results.jsonl", {"base": [0.5, 0.6, 0.55], "better": [0.8, 0.9, 0.85]})
    base, better = found.found
    assert better.difference_text(base, "length=64").endswith(" *")
    better.runs[1]["scores"]["length=64"] = None
    assert better.score_text("length=64").endswith("(2 of 3 seeds)")
    assert not better.difference_text(base, "length=64").endswith("*")
    assert better.difference_text(base, "length=16").endswith(" *")
    assert "better than base" in found.sentences()[0] and better.seeds == "3"


def test_seeds_to_come_are_no_failure(tmp_path: Path) -> None:
    scores: dict[str, list[float | None]] = {"base": [0.5, 0.6, 0.55, None], "better": [0.8, 0.9, 0.85, None]}
    found = of_scores(tmp_path / "results.jsonl", scores)
    assert "better than base by 0.300 ± 0.000, significant (3 seeds)" in found.sentences()[0]
    assert found.found[0].seeds == "3 of 4" and found.found[0].score_text("length=16") == "0.550 ± 0.029"


def test_a_rule_of_which_every_run_failed_is_named(tmp_path: Path) -> None:
    found = of_scores(tmp_path / "results.jsonl", {"base": [0.5], "other": [math.nan]})
    assert "Without a score, because runs failed: recall, other, state 64." in write_report(found, tmp_path).read_text()


def test_failed_and_stopped_runs_are_told_apart(tmp_path: Path) -> None:
    one = entry("base", rates=Rates((1e-2,)))
    records = Records(tmp_path / "results.jsonl")
    with records.writing():
        first, second, third = one.final(1e-2)
        records.add(first, "done", result=result(0.5))
        records.add(second, "stopped", error="5 minutes were over")
        records.add(third, "failed", error="ValueError: no", details="")
    text = write_report(findings(Plan("", "base", 1, (one,)), records), tmp_path).read_text()
    assert "1 failed, 1 stopped" in text and "1 of 3, 1 failed" in text


@pytest.mark.parametrize(("count", "warned"), [(1, False), (2, True), (3, False)])
def test_of_two_rates_the_report_says_once_that_the_best_may_lie_outside(
    tmp_path: Path, count: int, warned: bool
) -> None:
    entries = tuple(entry(rule, rates=Rates((1e-3, 1e-2, 1e-1)[:count], (100,))) for rule in ("base", "other"))
    records = Records(tmp_path / "results.jsonl")
    with records.writing():
        for one in entries:
            for training in (*one.search(), *one.final(1e-3)):
                records.add(training, "done", result=result(1e-3 / training.about["learning_rate"]))
    text = write_report(findings(Plan("", "base", 1, entries), records), tmp_path).read_text()
    assert text.count("Two learning rates were tried") == warned
    assert ("At the end of the range" in text) == (count == 3)


def text_result(loss: float, accuracy: float) -> dict[str, Any]:
    """As `train_text` returns it, with the context of training and a longer one."""
    places = [{"up_to": 2**n, "nats_per_token": loss - 0.1 * n, "tokens": 9} for n in range(5)]
    return {
        "better": "lower",
        "metric": "nats a token",
        "scores": {"nats": loss, "repeated rare bigrams": 2 * loss, "nats at 16,384": loss, "nats at 4,096": loss},
        "ceiling": {},
        "baseline": {},
        "text": {
            "test": {"4": {"positions": places[:3]}, "16": {"positions": places}},
            "lambada": {"accuracy": accuracy, "accuracy_stderr": 0.1, "word_perplexity": 9.0, "rows": 5},
        },
    }


@pytest.fixture
def text_found(tmp_path: Path) -> Findings:
    """`other` has lower nats, which are better, and a lower accuracy on LAMBADA, which is worse."""
    found = of_scores(tmp_path / "results.jsonl", {"base": [0.5] * 3, "other": [0.5] * 3})
    for finding, loss, accuracy in zip(found.found, (3.0, 2.0), (0.5, 0.25), strict=True):
        for seed, run in finding.runs.items():
            run.update(text_result(loss + 0.01 * seed, accuracy + 0.01 * seed))
    return found


def test_lambada_has_a_column_with_its_own_direction(text_found: Findings, tmp_path: Path) -> None:
    base, other = text_found.found
    assert base.labels == ["nats", "repeated rare bigrams", "nats at 16,384", "nats at 4,096", LAMBADA]
    assert other.lower("nats") and not other.lower(LAMBADA)
    assert other.difference_text(base, LAMBADA) == "-0.250 ± 0.000 *"
    text = write_report(text_found, tmp_path / "out").read_text()
    shown = {re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td class=best>(.*?)</td>", text)}
    assert "2.010 ± 0.006" in shown and "0.510 ± 0.006" in shown and "3.010 ± 0.006" not in shown
    assert '<th scope="col">LAMBADA accuracy</th>' in text


def test_loss_by_position_is_that_of_the_longest_context(text_found: Findings, tmp_path: Path) -> None:
    curve = by_position(text_found, "recall")["other"]
    assert [(x, round(y, 3)) for x, y, _ in curve] == [(2**n, round(2.01 - 0.1 * n, 3)) for n in range(5)]
    text = write_report(text_found, tmp_path / "out").read_text()
    assert "nats a token by position in the document" in text
    assert (tmp_path / "out" / "loss-by-position.png").read_bytes().startswith(b"\x89PNG")
    places = re.findall(r'<text x="([\d.]+)" [^>]*text-anchor="middle">(1|2|4|8|16)</text>', text)
    gaps = {round(float(b) - float(a)) for (a, _), (b, _) in pairwise(places)}
    assert [name for _, name in places] == ["1", "2", "4", "8", "16"] and max(gaps) - min(gaps) <= 1, "a log axis"


def test_labels_without_a_number_have_no_place_on_the_axis(text_found: Findings) -> None:
    assert {rule: [x for x, _, _ in curve] for rule, curve in by_label(text_found, "recall").items()} == {
        "base": [4096.0, 16384.0],
        "other": [4096.0, 16384.0],
    }


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
    for name in set(CHARTS) - {"loss-by-position"}:  # which only text has
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_curves_are_by_length_and_by_state(found: Findings) -> None:
    assert [point[0] for point in by_label(found, "recall")["better, 64"]] == [16.0, 64.0]
    curve = by_state(found, "recall")["better"]
    assert [(x, round(y, 3)) for x, y, _ in curve] == [(64, 0.85), (128, 0.9)]
    tokens = CHARTS["loss-by-tokens"][2](found, "recall")["base"]
    assert [(x, y) for x, y, _ in tokens] == [(10, 1.0), (20, 0.5), (30, pytest.approx(1 / 3))]


def test_charts_of_scores_show_what_an_oracle_and_a_guess_score(found: Findings) -> None:
    curves = by_label(found, "recall")
    assert curves["ceiling"] == [(16.0, 1.0, 0.0), (64.0, 1.0, 0.0)]
    assert by_state(found, "recall")["baseline"] == [(64, 0.1, 0.0), (128, 0.1, 0.0)]
    for finding in found.found:
        for run in finding.runs.values():
            del run["ceiling"], run["baseline"]
    assert not {"ceiling", "baseline"} & (by_label(found, "recall") | by_state(found, "recall")).keys()


@pytest.mark.parametrize(("width", "gone"), [(160, 0), (100, 1), (80, 3), (60, 4)])
def test_a_narrow_terminal_gets_fewer_columns(found: Findings, width: int, gone: int) -> None:
    """Names, main scores, differences, and sizes where there are several, stay whole; the report has the rest."""
    optional = ["parameters", "learning rate", "seeds", "length=64"]
    console = Console(width=width, file=StringIO(), record=True)
    console.print(_fitting(found, "recall", console))
    text = console.export_text()
    assert [name for name in optional if name in text] == optional[gone:] and "state size" in text
    assert "+0.250 ± 0.029 *" in text and "better" in text and "…" not in text


def test_a_report_says_what_was_run(found: Findings, tmp_path: Path) -> None:
    settings = {
        "task": "mqar",
        "task_options": {"pairs": 6, "noise": None},
        "model": {"layers": 2, "rule": "base", "options": {"gate": False}, "value_dim": 64},
        "tests": {"long": {"length": 99}},
        "device": "cpu",
    }
    entry = replace(found.found[0].entry, settings=settings)
    said = shared_settings(entry)
    assert said == "steps 10, task mqar, pairs 6, layers 2, value dim 64, device cpu, learning rates 0.001 0.01 0.1"
    changed = Findings(replace(found.plan, entries=(entry, *found.plan.entries[1:])), found.found, [])
    assert said in write_report(changed, tmp_path).read_text()


def test_collected_results_have_no_curves_of_the_loss(found: Findings, tmp_path: Path) -> None:
    for finding in found.found:
        for run in finding.runs.values():
            del run["curve"]  # experiments/collect.py leaves it out
    write_report(found, tmp_path)
    assert not (tmp_path / "loss-by-tokens.png").exists() and (tmp_path / "score-by-length.png").exists()


def test_the_names_of_many_curves_cover_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(2.0**n, 0.9 - 0.1 * n, 0.02) for n in range(5)]
    names = [*(f"prism:steps={n},preset=paper" for n in range(8)), "ceiling"]
    panels = {task: dict.fromkeys(names[n:], points) for n, task in enumerate(("recall", "copy"))}
    drawn: list[str] = []

    def look(figure: Any, path: Path) -> None:
        figure.draw_without_rendering()
        whole, (legend,) = figure.bbox, figure.legends
        box = legend.get_window_extent()
        assert not any(box.overlaps(axis.get_tightbbox()) for axis in figure.axes)
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0
        assert all(axis.get_legend() is None and axis.bbox.width > 4 * figure.dpi for axis in figure.axes)
        drawn.extend(text.get_text() for text in legend.get_texts())

    monkeypatch.setattr(module, "save", look)
    module._picture(panels, CHARTS["score-by-length"], dict.fromkeys(panels, "accuracy"), tmp_path / "a.png")
    assert drawn == names


def test_what_has_no_curve_has_no_picture(found: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "score-by-state.png").write_text("old")
    one = Findings(found.plan, found.found[:3], [])
    drawn: list[str] = []
    monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(path.stem))
    write_report(one, tmp_path)
    assert "score-by-state" not in drawn and not (tmp_path / "score-by-state.png").exists()
    assert "score-by-length" in drawn


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("length=64", 64),
        ("40-256", 256),
        ("2 pairs", 2),
        ("nats at 16,384", 16384),
        ("1,048,576", 1048576),
        ("levels 1,2", 2),
        ("rate 0.25", 0.25),
        ("", None),
        ("mixture", None),
    ],
)
def test_numbers_in_labels(label: str, expected: float | None) -> None:
    assert number(label) == expected
