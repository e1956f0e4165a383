"""Charts of how a recommender does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prism.reports.charts import Series, bar_chart, line_chart, percent

FEW_TARGETS = 10
"""Groups of fewer targets say nothing: tables show them faint, charts leave them out."""


def is_small(group: Mapping[str, Any]) -> bool:
    """Whether a group has too few targets to say anything."""
    return bool(group["targets"] < FEW_TARGETS)


def group_chart(groups: Sequence[Mapping[str, Any]], names: Sequence[str], title: str, x: str) -> str | None:
    """Metrics of groups of targets, with standard errors; None if no group is large enough."""
    shown = [group for group in groups if not is_small(group)]
    if not shown:
        return None
    series = []
    for name in names:
        values = [(group["metrics"][name], group["standard_errors"][name]) for group in shown]
        points = [(float(place), value) for place, (value, _) in enumerate(values)]
        series.append(Series(name, points, [(value - error, value + error) for value, error in values]))
    highest = max(high for one in series for _, high in one.ranges)
    labels = [group["group"].replace(" to ", "–") for group in shown]
    return line_chart(
        title,
        series,
        x=x,
        y="mean ± standard error",
        y_limits=(0, max(highest, 0.01)),
        x_labels=labels,
        error_bars=True,
    )


def loss_charts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Training loss, and each metric of validation, by step."""
    validated = [key for key in dict.fromkeys(key for r in records for key in r) if key.startswith("validation_")]
    charts = [line_chart("Training loss", [_curve(records, "loss")], x="step", x_from=0, y="nats per event")]
    if validated:
        curves = [_curve(records, key) for key in validated]
        charts.append(line_chart("Validation", curves, x="step", x_from=0, y="held-out events", own_legend=True))
    return charts


def popularity_chart(bias: Mapping[str, Any], k: str) -> tuple[str, list[str]]:
    """The share of events and of top-k lists that each tenth of the items has; returns the chart and its series' names."""
    series = [("training events", bias["share_of_events"]), (f"top-{k[1:]} lists", bias["share_of_recommendations"][k])]
    groups = [str(place) for place in range(1, 1 + len(bias["items_in_group"]))]
    x = "tenth of the items, most popular first"
    chart = bar_chart("Popular items", groups, series, x=x, y="share of all", y_format=percent)
    return chart, [name for name, _ in series]


def _curve(records: Sequence[Mapping[str, Any]], key: str) -> Series:
    points = [(float(r["step"]), float(r[key])) for r in records if r.get(key) is not None]
    return Series(key.removeprefix("validation_"), points)
