"""The report of a comparison: one HTML page without scripts, and the same charts as PNG files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prism import __version__
from prism.compare.findings import Finding, Findings
from prism.compare.statistics import FEWEST, Estimate, estimate
from prism.files import write_atomically
from prism.reports.charts import Series, line_chart
from prism.reports.page import commands, facts, figure, header, heading, page, paragraph, table, tiles
from prism.reports.results import COLORS, pyplot, save

Point = tuple[float, float, float]
"""x, mean, standard error (0 for one seed)."""
Curves = dict[str, list[Point]]
"""By rule."""


def write_report(found: Findings, out: Path) -> Path:
    """Write report.html and the pictures into a folder; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (x, y, curves_of) in CHARTS.items():
        picture = {task: curves_of(found, task) for task in found.plan.tasks}
        _picture({task: curves for task, curves in picture.items() if curves}, x, y, out / f"{name}.png")
    path = out / "report.html"
    write_atomically(path, page(found.plan.title, _body(found)))
    return path


def by_label(found: Findings, task: str) -> Curves:
    """Score against the number in the test's label (length, pairs); {} if labels have no numbers, or there is one."""
    rows = found.task(task)
    places = {label: number(label) for finding in rows for label in finding.labels}
    if len(places) < 2 or None in places.values():
        return {}
    curves: Curves = {}
    for finding in rows:
        points = [(places[label], finding.score(label)) for label in finding.labels]
        name = (
            finding.entry.rule
            if len(found.plan.rules) == len(rows)
            else f"{finding.entry.rule}, {finding.entry.state_size:,}"
        )
        curves[name] = sorted((x, score.mean, _error(score)) for x, score in points if x is not None and score.count)
    return curves


def by_state(found: Findings, task: str) -> Curves:
    """Main score against state size; {} if every rule has one size. Caches, which grow, have no place."""
    curves: Curves = {}
    for finding in found.task(task):
        if not finding.entry.grows:
            score = finding.score(finding.labels[0])
            curves.setdefault(finding.entry.rule, []).append((finding.entry.state_size, score.mean, _error(score)))
    return {rule: sorted(points) for rule, points in curves.items()} if any(len(p) > 1 for p in curves.values()) else {}


def loss_by(key: str) -> Callable[[Findings, str], Curves]:
    """Training loss against `tokens` or `seconds`, the mean over seeds, of the largest size of each rule."""

    def curves_of(found: Findings, task: str) -> Curves:
        largest = max((finding.entry.size for finding in found.task(task)), default=0)
        rows = {f.entry.rule: f for f in found.task(task) if f.entry.size == largest}
        return {rule: points for rule, finding in rows.items() if (points := _loss_curve(finding, key))}

    return curves_of


def _loss_curve(finding: Finding, key: str) -> list[Point]:
    """Points that every seed has (runs may have stopped early, and results collected from elsewhere have no curves)."""
    curves = [[point for point in run.get("curve", ()) if point["loss"] is not None] for run in finding.runs.values()]
    points = []
    for same in zip(*curves, strict=False):
        loss = estimate(point["loss"] for point in same)
        points.append((estimate(point[key] for point in same).mean, loss.mean, _error(loss)))
    return points


CHARTS: dict[str, tuple[str, str, Callable[[Findings, str], Curves]]] = {
    "score-by-length": ("test", "score", by_label),
    "score-by-state": ("numbers in the state", "score", by_state),
    "loss-by-tokens": ("tokens", "training loss", loss_by("tokens")),
    "loss-by-time": ("seconds", "training loss", loss_by("seconds")),
}
"""File name → the axes and where the curves come from."""


def number(label: str) -> float | None:
    """The last number in a label: 64 of `length=64` or `40-64`; None if there is none."""
    found = re.findall(r"\d+(?:\.\d+)?", label)
    return float(found[-1]) if found else None


def _error(score: Estimate) -> float:
    return 0.0 if score.count < 2 else score.error


def _body(found: Findings) -> list[str]:
    plan, rows = found.plan, [finding for finding in found.found if finding.runs]
    seeds = sorted({seed for finding in rows for seed in finding.runs})
    failures = [line for finding in found.found for line in finding.failures]
    seconds = sum(run["seconds"] or 0 for finding in rows for run in finding.runs.values())
    said = found.sentences()
    body = [
        header(
            "Comparison",
            plan.title,
            said[0]
            if len(said) == 1
            else f"{len(plan.rules)} rules on {len(plan.tasks)} task{'s' * (len(plan.tasks) > 1)}, against {plan.reference}.",
            "Scores are means over seeds ± standard error. Differences are paired by seed: at one seed every rule sees the "
            "same data. A difference over three seeds or more is marked if it exceeds two standard errors; with fewer than "
            "five seeds that is weak evidence. In tables of scores the best mean of a column is blue.",
        ),
        tiles(
            [
                ("rules", str(len(plan.rules)), "compared"),
                ("seeds", str(len(seeds)), ", ".join(map(str, seeds))),
                (
                    "final runs",
                    str(sum(len(f.runs) for f in rows)),
                    f"{len(failures)} failed or stopped" if failures else "none failed",
                ),
                ("training", f"{seconds / 60:.1f}", "minutes, summed over final runs"),
            ]
        ),
    ]
    for task in plan.tasks:
        body += _task_section(found, task)
    if failures:
        body += [heading("Runs that failed or were stopped"), table(*_failure_table(failures))]
    machines = [
        ("machine", ", ".join(f"{name} {value}" for name, value in about.items() if value is not None))
        for about in found.machines
    ]
    return [
        *body,
        heading("How it was measured"),
        facts([*machines, ("prism", __version__)]),
        *_commands(found),
    ]


def _task_section(found: Findings, task: str) -> list[str]:
    rows = found.task(task)
    if not rows:
        return [heading(task), paragraph("No run has finished.")]
    labels = list(dict.fromkeys(label for finding in rows for label in finding.labels))
    metric = str(rows[0].first("metric", "score"))
    lower = rows[0].first("better") == "lower"
    panels = []
    for x, y, curves_of in CHARTS.values():
        curves = curves_of(found, task)
        if curves:
            panels.append(_chart(f"{y if y != 'score' else metric} by {x}", curves, x, metric if y == "score" else y))
    parts = [heading(task), table(*_score_table(found, rows, labels, metric), best=_best(rows, labels, lower))]
    differences = [finding for finding in rows if found.reference(finding) is not None]
    if differences:
        parts += [
            paragraph(
                f"Differences from {found.plan.reference}, paired by seed; * beyond two standard errors, with {FEWEST} seeds "
                "or more."
            ),
            table(
                ["rule", "state size", *(label or metric for label in labels)],
                [_difference_row(found, f, labels) for f in differences],
            ),
        ]
    caption = "Bands and bars are standard errors over seeds. Seconds depend on what else the machine did."
    parts += [figure(panels, caption)] if panels else []
    searched = [finding for finding in rows if finding.validations]
    if searched:
        rates = list(dict.fromkeys(rate for finding in searched for rate in finding.validations))
        cells = [
            [
                f.entry.rule,
                f"{f.entry.state_size:,}",
                *(f.validations[r].text() if r in f.validations else "" for r in rates),
            ]
            for f in searched
        ]
        edge = [f.entry.rule for f in searched if f.at_edge]
        parts += [
            paragraph(
                "The search for a learning rate: score on validation by rate. The best one was used with every seed."
            ),
            table(
                ["rule", "state size", *(f"{rate:g}" for rate in rates)],
                cells,
                best=lambda i, j: j > 1 and searched[i].rate == rates[j - 2],
            ),
        ]
        if edge:
            parts.append(
                paragraph(
                    f"At the end of the range, where a better rate may lie beyond: {', '.join(edge)}.", quiet=True
                )
            )
    return parts


def _score_table(
    found: Findings, rows: Sequence[Finding], labels: Sequence[str], metric: str
) -> tuple[list[str], list[list[str]]]:
    names = [
        "rule",
        "parameters",
        "state size",
        "learning rate",
        *(label or metric for label in labels),
        "seconds",
        "seeds",
    ]
    cells = []
    for finding in rows:
        seconds = estimate(run["seconds"] or 0.0 for run in finding.runs.values())
        cells.append(
            [
                finding.entry.rule,
                f"{finding.entry.parameters:,}",
                f"{finding.entry.state_size:,}{' a token' if finding.entry.grows else ''}",
                f"{finding.rate:g}",
                *(finding.score(label).text() for label in labels),
                f"{seconds.mean:.0f}",
                str(len(finding.runs)),
            ]
        )
    for name in ("ceiling", "baseline"):
        values = rows[0].first(name)
        if values:
            cells.append(
                [
                    name,
                    "",
                    "",
                    "",
                    *(f"{values[label]:.3f}" if values.get(label) is not None else "" for label in labels),
                    "",
                    "",
                ]
            )
    return names, cells


def _best(rows: Sequence[Finding], labels: Sequence[str], lower: bool) -> Callable[[int, int], bool]:
    """Whether a cell of the score table holds the best mean of its column."""
    means = [[finding.score(label).mean for finding in rows if finding.score(label).count] for label in labels]
    tops = [(min if lower else max)(column) if column else None for column in means]

    def best(row: int, column: int) -> bool:
        place = column - 4
        return row < len(rows) and 0 <= place < len(labels) and rows[row].score(labels[place]).mean == tops[place]

    return best


def _difference_row(found: Findings, finding: Finding, labels: Sequence[str]) -> list[str]:
    reference = found.reference(finding)
    assert reference is not None
    cells = []
    for label in labels:
        difference = finding.difference(reference, label)
        cells.append(f"{difference.text(sign=True)}{' *' if difference.significant else ''}")
    return [finding.entry.rule, f"{finding.entry.state_size:,}", *cells]


def _failure_table(failures: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = ["task", "rule", "phase", "learning rate", "seed", "status", "error"]
    keys = ("task", "rule", "phase", "learning_rate", "seed", "status", "error")
    return names, [[str(line.get(key, "")) for key in keys] for line in failures]


def _chart(title: str, curves: Curves, x: str, y: str) -> str:
    series = [
        Series(
            name, [(at, mean) for at, mean, _ in points], [(mean - error, mean + error) for _, mean, error in points]
        )
        for name, points in curves.items()
    ]
    return line_chart(title, series, x=x, y=y, own_legend=True)


def _commands(found: Findings) -> list[str]:
    lines = list(dict.fromkeys(filter(None, found.commands)))
    return [commands(*lines)] if lines else []


def _picture(panels: dict[str, Curves], x: str, y: str, path: Path) -> None:
    """A panel for each task, a line for each rule, bands of one standard error. Nothing to show: no file."""
    path.unlink(missing_ok=True)
    if not panels:
        return
    plt = pyplot()
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    drawn, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 4.0 * lines), squeeze=False)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors = dict(zip(names, COLORS * 9, strict=False))
    for axis, (task, curves) in zip(axes.flat, panels.items(), strict=False):
        for name, points in curves.items():
            at, mean, error = zip(*points, strict=True)
            marker = "o" if len(points) < 20 else None
            axis.plot(at, mean, marker=marker, color=colors[name], label=name)
            low, high = (
                [m - e for m, e in zip(mean, error, strict=True)],
                [m + e for m, e in zip(mean, error, strict=True)],
            )
            axis.fill_between(at, low, high, color=colors[name], alpha=0.18, lw=0)
        axis.set(title=task, xlabel=x, ylabel=y)
        places = sorted({point[0] for points in curves.values() for point in points})
        if x not in ("tokens", "seconds") and places[0] > 0:  # a few sizes or lengths, usually powers of two
            axis.set_xscale("log", base=2)
            axis.set_xticks(places, [f"{place:g}" for place in places])
            axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    drawn.tight_layout()
    save(drawn, path)
    plt.close(drawn)
