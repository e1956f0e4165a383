"""The report of a comparison: one HTML page without scripts, and the same charts as PNG files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from prism import __version__
from prism.files import write_atomically
from prism.lab.charts import Series, line_chart, short
from prism.lab.curves import CHARTS, LEVELS, Chart, Curves
from prism.lab.entries import Entry
from prism.lab.findings import Finding, Findings, has_failed
from prism.lab.page import commands, facts, figure, header, heading, page, paragraph, table, tiles
from prism.lab.results import COLORS, pyplot, save
from prism.lab.statistics import FEWEST, estimate

NOT_SHARED = ("rule", "options", "rule_options", "optimizer", "tests")
"""Entries of a training's settings that a rule decides, at any depth, and the tests, which the tables name."""
_MOST_TICKS = 9
"""Numbers that fit below a picture's axis."""
_MOST_NAMES = 18
"""Names of curves that fit one below the other at the right of a panel."""


def write_report(found: Findings, out: Path) -> Path:
    """Write report.html and the pictures into a folder; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    for name, chart in CHARTS.items():
        picture = {task: chart.curves_of(found, task) for task in found.plan.tasks}
        metrics = {task: next((str(f.first("metric", "score")) for f in found.task(task)), "score") for task in picture}
        _picture({task: curves for task, curves in picture.items() if curves}, chart, metrics, out / f"{name}.png")
    path = out / "report.html"
    write_atomically(path, page(found.plan.title, _body(found)))
    return path


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
            "same data. A difference over three seeds or more is marked if it is significant at 5 % (Student's t). In tables "
            "of scores the best mean of a column is blue.",
        ),
        tiles(
            [
                ("rules", str(len(plan.rules)), "compared"),
                ("seeds", str(len(seeds)), ", ".join(map(str, seeds))),
                (
                    "final runs",
                    str(sum(len(f.runs) for f in rows)),
                    _ended_early(failures),
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
    two = any(len(finding.entry.rates.values) == 2 for finding in rows)
    return [
        *body,
        heading("How it was measured"),
        *([paragraph("Two learning rates were tried: the best may lie outside of them.")] if two else []),
        facts([*machines, ("prism", __version__), *_settings(found)]),
        *_commands(found),
    ]


def _settings(found: Findings) -> list[tuple[str, str]]:
    """For each task its settings that all rules share."""
    entries = {entry.task: entry for entry in reversed(found.plan.entries) if entry.rule == found.plan.reference}
    return [(task, shared_settings(entries[task])) for task in found.plan.tasks if task in entries]


def shared_settings(entry: Entry) -> str:
    """`steps 600, batch 64, width 64 …`: the settings of a training, without its rule."""

    def texts(values: dict[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            a_rule = name == "layers" and isinstance(value, str)  # in synthetic tasks it is a number
            if a_rule or name in NOT_SHARED or value is None or value in ("", {}, [], ()):
                continue
            if isinstance(value, dict):
                yield from texts(value)
            else:
                several = isinstance(value, (list, tuple))
                yield f"{name.replace('_', ' ')} {' '.join(map(str, value)) if several else value}"

    rates = " ".join(f"{rate:g}" for rate in entry.rates.values)
    return ", ".join([*texts({"steps": entry.steps, **entry.settings}), f"learning rates {rates}"])


def _ended_early(failures: Sequence[dict[str, Any]]) -> str:
    """How many runs failed and were stopped, in words."""
    failed = sum(map(has_failed, failures))
    stopped = len(failures) - failed
    return f"{failed or 'none'} failed{f', {stopped} stopped' if stopped else ''}"


def _task_section(found: Findings, task: str) -> list[str]:
    rows = found.task(task)
    lost = [finding.entry.name for finding in found.without_score(task)]
    without = [paragraph(f"Without a score, because runs failed: {'; '.join(lost)}.")] if lost else []
    if not rows:
        return [heading(task), paragraph("No run has finished."), *without]
    labels = list(dict.fromkeys(label for finding in rows for label in finding.labels))
    metric = str(rows[0].first("metric", "score"))
    panels = []
    for chart in CHARTS.values():
        curves = chart.curves_of(found, task)
        if curves:
            panels.append(_chart(chart, curves, metric))
    parts = [heading(task), table(*_score_table(rows, labels, metric), best=_best(rows, labels)), *without]
    differences = [finding for finding in rows if found.reference(finding) is not None]
    if differences:
        parts += [
            paragraph(
                f"Differences from {found.plan.reference}, paired by seed; * significant at 5 %, with {FEWEST} seeds or more, "
                "none of which failed."
            ),
            table(
                ["rule", "state size", *(label or metric for label in labels)],
                [_difference_row(found, f, labels) for f in differences],
            ),
        ]
    sizes = len({finding.entry.size for finding in rows}) > 1
    caption = "Bands and bars are standard errors over seeds. Seconds depend on what else the machine did."
    caption += " Losses are those of the largest state." * sizes
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


def _score_table(rows: Sequence[Finding], labels: Sequence[str], metric: str) -> tuple[list[str], list[list[str]]]:
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
                *(finding.score_text(label) for label in labels),
                f"{seconds.mean:.0f}",
                finding.seeds,
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


def _best(rows: Sequence[Finding], labels: Sequence[str]) -> Callable[[int, int], bool]:
    """Whether a cell of the score table holds the best mean of its column."""
    tops = []
    for label in labels:
        column = [finding.score(label).mean for finding in rows if finding.score(label).count]
        tops.append((min if rows[0].lower(label) else max)(column) if column else None)

    def best(row: int, column: int) -> bool:
        place = column - 4
        return row < len(rows) and 0 <= place < len(labels) and rows[row].score(labels[place]).mean == tops[place]

    return best


def _difference_row(found: Findings, finding: Finding, labels: Sequence[str]) -> list[str]:
    reference = found.reference(finding)
    assert reference is not None
    cells = [finding.difference_text(reference, label) for label in labels]
    return [finding.entry.rule, f"{finding.entry.state_size:,}", *cells]


def _failure_table(failures: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = ["task", "rule", "phase", "learning rate", "seed", "status", "error"]
    keys = ("task", "rule", "phase", "learning_rate", "seed", "status", "error")
    return names, [[str(line.get(key, "")) for key in keys] for line in failures]


def _chart(chart: Chart, curves: Curves, metric: str) -> str:
    y = metric if chart.y == "score" else chart.y
    places = sorted({at for points in curves.values() for at, _, _ in points})
    even = chart.log and len(places) > 2 and places[0] > 0 and _evenly_doubled(places)
    at = {place: float(number) for number, place in enumerate(places)} if even else {place: place for place in places}
    series = [
        Series(
            name, [(at[x], mean) for x, mean, _ in points], [(mean - error, mean + error) for _, mean, error in points]
        )
        for name, points in curves.items()
    ]
    labels = [short(place) for place in places] if even else ()
    return line_chart(f"{y} by {chart.x}", series, x=chart.x, y=y, x_labels=labels, own_legend=True)


def _evenly_doubled(places: Sequence[float]) -> bool:
    """Whether each place is the same multiple of the one before: on a logarithmic axis they are evenly spaced."""
    return all(math.isclose(b * places[0], a * places[1]) for a, b in pairwise(places))


def _commands(found: Findings) -> list[str]:
    lines = list(dict.fromkeys(filter(None, found.commands)))
    return [commands(*lines)] if lines else []


def _picture(panels: dict[str, Curves], chart: Chart, metrics: dict[str, str], path: Path) -> None:
    """A panel for each task, a line for each rule, bands of one standard error; ceiling and baseline are grey. The names of
    all panels are at the right. Nothing to show: no file."""
    path.unlink(missing_ok=True)
    if not panels:
        return
    plt = pyplot()
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (5.2 * columns, 4.0 * lines)
    drawn, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    names = dict.fromkeys(name for curves in panels.values() for name in curves if name not in LEVELS)
    colors = dict(zip(names, COLORS * 9, strict=False))
    for axis, (task, curves) in zip(axes.flat, panels.items(), strict=False):
        for name, points in curves.items():
            at, mean, error = zip(*points, strict=True)
            if name in LEVELS:
                axis.plot(at, mean, color="0.6", linestyle="--" if name == LEVELS[0] else ":", label=name)
                continue
            marker = "o" if len(points) < 20 else None
            axis.plot(at, mean, marker=marker, color=colors[name], label=name)
            low, high = (
                [m - e for m, e in zip(mean, error, strict=True)],
                [m + e for m, e in zip(mean, error, strict=True)],
            )
            axis.fill_between(at, low, high, color=colors[name], alpha=0.18, lw=0)
        axis.set(title=task, xlabel=chart.x, ylabel=metrics[task] if chart.y == "score" else chart.y)
        places = sorted({point[0] for points in curves.values() for point in points})
        if chart.log and places[0] > 0:  # sizes or lengths, usually powers of two
            axis.set_xscale("log", base=2)
            named = places[:: -(-len(places) // _MOST_TICKS)]
            axis.set_xticks(named, [f"{place:g}" for place in named])
            axis.minorticks_off()
        axis.grid(alpha=0.3)
    key = {name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    key = {name: key[name] for name in (*names, *LEVELS) if name in key}
    look: dict[str, Any] = {"ncols": -(-len(key) // (_MOST_NAMES * lines)), "frameon": False, "fontsize": "small"}
    legend = drawn.legend(key.values(), key.keys(), loc="outside right upper", **look)
    drawn.set_size_inches(
        size[0] + legend.get_window_extent().width / drawn.dpi, size[1]
    )  # the panels keep their width
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    save(drawn, path)
    plt.close(drawn)
