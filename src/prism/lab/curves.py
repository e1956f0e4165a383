"""The curves of a report: what is drawn of a comparison's findings, and against what."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prism.lab.findings import Finding, Findings
from prism.lab.statistics import Estimate, estimate

Point = tuple[float, float, float]
"""x, mean, standard error (0 for one seed)."""
Curves = dict[str, list[Point]]
"""By rule."""


class Chart(NamedTuple):
    """The axes of a chart, and where its curves come from."""

    x: str
    y: str
    """`score` stands for the task's metric."""
    curves_of: Callable[[Findings, str], Curves]
    log: bool
    """Whether x doubles from place to place."""


LEVELS = ("ceiling", "baseline")
"""Curves that are no rule's: what an oracle scores, and a guess."""


def by_label(found: Findings, task: str) -> Curves:
    """Score against the number in the test's label (length, pairs); {} if fewer than two labels have one."""
    rows = found.task(task)
    places = {label: place for f in rows for label in f.labels if (place := number(label)) is not None}
    if len(places) < 2:
        return {}
    curves: Curves = {}
    for finding in rows:
        points = [(place, finding.score(label)) for label, place in places.items()]
        name = (
            finding.entry.rule
            if len(found.plan.rules) == len(rows)
            else f"{finding.entry.rule}, {finding.entry.state_size:,}"
        )
        curve = sorted((x, score.mean, _error(score)) for x, score in points if score.count)
        curves |= {name: curve} if curve else {}
    return {**curves, **_levels(rows, sorted((place, label) for label, place in places.items()))}


def by_state(found: Findings, task: str) -> Curves:
    """Main score against state size; {} if every rule has one size. Caches, which grow, have no place."""
    curves: Curves = {}
    for finding in found.task(task):
        if not finding.entry.grows:
            score = finding.score(finding.labels[0])
            curves.setdefault(finding.entry.rule, []).append((finding.entry.state_size, score.mean, _error(score)))
    if not any(len(points) > 1 for points in curves.values()):
        return {}
    rows = found.task(task)
    sizes = sorted({size for points in curves.values() for size, _, _ in points})
    return {
        **{rule: sorted(points) for rule, points in curves.items()},
        **_levels(rows, [(size, rows[0].labels[0]) for size in sizes]),
    }


def _levels(rows: Sequence[Finding], places: Sequence[tuple[float, str]]) -> Curves:
    """Ceiling and baseline of the test at each place, as far as the task has them."""
    curves: Curves = {}
    for name in LEVELS:
        values: dict[str, float | None] = rows[0].first(name, {})
        points = [(place, value, 0.0) for place, label in places if (value := values.get(label)) is not None]
        curves |= {name: points} if points else {}
    return curves


def loss_by(key: str) -> Callable[[Findings, str], Curves]:
    """Training loss against `tokens` or `seconds`, the mean over seeds, of the largest size of each rule."""
    return lambda found, task: _of_largest(found, task, lambda finding: _loss_curve(finding, key))


def by_position(found: Findings, task: str) -> Curves:
    """Loss on the test split against the position in a document, at the longest context, of the largest size; {} off text."""
    return _of_largest(found, task, _position_curve)


def _of_largest(found: Findings, task: str, curve: Callable[[Finding], list[Point]]) -> Curves:
    """One curve for each rule, of its largest size."""
    largest = max((finding.entry.size for finding in found.task(task)), default=0)
    rows = {f.entry.rule: f for f in found.task(task) if f.entry.size == largest}
    return {rule: points for rule, finding in rows.items() if (points := curve(finding))}


def _loss_curve(finding: Finding, key: str) -> list[Point]:
    """Points that every seed has (runs may have stopped early, and results collected from elsewhere have no curves)."""
    curves = [[point for point in run.get("curve", ()) if point["loss"] is not None] for run in finding.runs.values()]
    points = []
    for same in zip(*curves, strict=False):
        loss = estimate(point["loss"] for point in same)
        points.append((estimate(point[key] for point in same).mean, loss.mean, _error(loss)))
    return points


def _position_curve(finding: Finding) -> list[Point]:
    """Points by the last position of each bin."""
    losses: dict[int, list[float]] = {}
    for run in finding.runs.values():
        measured = run.get("text", {}).get("test", {})
        longest = measured[max(measured, key=int)].get("positions", ()) if measured else ()
        for place in longest:
            if place["nats_per_token"] is not None:
                losses.setdefault(place["up_to"], []).append(place["nats_per_token"])
    found = {place: estimate(values) for place, values in losses.items()}
    return sorted((place, loss.mean, _error(loss)) for place, loss in found.items())


CHARTS = {
    "score-by-length": Chart("test", "score", by_label, True),
    "score-by-state": Chart("numbers in the state", "score", by_state, True),
    "loss-by-position": Chart("position in the document", "nats a token", by_position, True),
    "loss-by-tokens": Chart("tokens", "training loss", loss_by("tokens"), False),
    "loss-by-time": Chart("seconds", "training loss", loss_by("seconds"), False),
}
"""By the name of the file."""


def number(label: str) -> float | None:
    """The last number in a label: 64 of `length=64` or `40-64`, 16384 of `at 16,384`; None if there is none."""
    found = re.findall(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", label)
    return float(found[-1].replace(",", "")) if found else None


def _error(score: Estimate) -> float:
    return 0.0 if score.count < 2 else score.error
