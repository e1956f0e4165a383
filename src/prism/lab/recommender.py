"""HTML report on a recommender: tables and charts, every metric with the protocol it depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism.files import write_atomically
from prism.lab.charts import Series, bar_chart, line_chart, percent
from prism.lab.page import commands, facts, figure, header, heading, page, paragraph, table, tiles
from prism.recommend.evaluate import protocol_line
from prism.recommend.ranking import CUTOFFS

FEW_TARGETS = 10
"""Groups with fewer targets are too small to compare: tables show them faint, charts leave them out."""
SHOWN_AT = 10
"""The cutoff of charts and of tables by group."""


def is_small(group: Mapping[str, Any]) -> bool:
    """Whether a group has too few targets to compare."""
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
    """Fractions of the events and of the top-k lists for each tenth of the items; returns the chart and its series' names."""
    series = [("training events", bias["share_of_events"]), (f"top-{k[1:]} lists", bias["share_of_recommendations"][k])]
    groups = [str(place) for place in range(1, 1 + len(bias["items_in_group"]))]
    x = "tenth of the items, most popular first"
    chart = bar_chart("Popular items", groups, series, x=x, y="share of all", y_format=percent)
    return chart, [name for name, _ in series]


def _curve(records: Sequence[Mapping[str, Any]], key: str) -> Series:
    points = [(float(r["step"]), float(r[key])) for r in records if r.get(key) is not None]
    return Series(key.removeprefix("validation_"), points)


def report(
    path: Path,
    results: Mapping[str, Any],
    *,
    title: str,
    command: str,
    about: Sequence[tuple[str, str]] = (),
    log: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the report.

    Args:
        results: the results of `evaluate_split`.
        about: facts on model and data, for a table.
        log: records of the training run, for a chart of its loss.
    """
    line = protocol_line(results["protocol"])
    label = results["protocol"]["label"]
    names = [f"{label}{name}@{SHOWN_AT}" for name in ("HR", "NDCG")]
    body = [
        header("Recommender evaluation", title, finding(results), f"Protocol: {line}."),
        tiles(_tiles(results)),
        *([facts(about)] if about else []),
        commands(command),
        heading("Metrics"),
        table(*metric_table(results)),
        paragraph(
            f"{line}. ± is the standard error over targets. HR: fraction of targets in the list; NDCG and MRR: more if "
            "further up; AUC: fraction of the other candidates placed below the target. Ties in scores count against the "
            "target. Of the lists: coverage: fraction of all items in at least one list; novelty: mean of -log2 of the items' "
            "share of the training events; serendipity: fraction of targets in the list that are not among the most popular "
            "items; diversity: 1 - mean cosine of two items of a list, by the users who had them.",
            quiet=True,
        ),
        *_baselines(results, line),
        *_by_history(results["by_history_length"], names, line),
        *_by_popularity(results["by_popularity"], names, line),
        heading("Popularity bias"),
        *_bias(results["popularity_bias"], line),
    ]
    if any("loss" in record for record in log):
        charts = loss_charts(log)
        body += [heading("Training"), figure(charts, "Training loss, and validation during the run.")]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(title, body))
    return path


def finding(results: Mapping[str, Any]) -> str:
    """The result in one sentence, compared with chance."""
    metrics, protocol = results["metrics"], results["protocol"]
    label, items = protocol["label"], protocol["items"]
    hits, name = metrics[f"{label}HR@{SHOWN_AT}"], f"{label}NDCG@{SHOWN_AT}"
    among = protocol["ranked"] if label else f"{items:,} items"
    error = f" ± {results['standard_errors'][name]:.3f}" if results["targets"] > 1 else ""
    chance = "" if label else f" Chance would give {100 * min(1.0, SHOWN_AT / items):.2g}%."
    return (
        f"The next item is among the top {SHOWN_AT} of {among} for {hits:.1%} of {results['targets']:,} held-out events "
        f"({name} {metrics[name]:.3f}{error}).{chance}"
    )


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    metrics, errors, label = results["metrics"], results["standard_errors"], results["protocol"]["label"]
    names = [f"{label}{name}" for name in (f"HR@{SHOWN_AT}", f"NDCG@{SHOWN_AT}", f"MRR@{SHOWN_AT}", "AUC")]
    shown = [
        (name, f"{metrics[name]:.3f}", f"± {errors[name]:.3f}" if results["targets"] > 1 else "") for name in names
    ]
    width = f"coverage@{SHOWN_AT}"
    if width in results["coverage"]:
        shown.append((width, f"{results['coverage'][width]:.1%}", f"of {results['protocol']['items']:,} items"))
    return shown


def _baselines(results: Mapping[str, Any], line: str) -> list[str]:
    """The model and the baselines in one table and one chart."""
    rivals = results.get("baselines")
    if not rivals:
        return []
    label = results["protocol"]["label"]
    everyone = [("model", results["metrics"]), *((one["name"].partition("(")[0], one["metrics"]) for one in rivals)]
    series = [
        (f"{label}{name}@{SHOWN_AT}", [metrics[f"{label}{name}@{SHOWN_AT}"] for _, metrics in everyone])
        for name in ("HR", "NDCG")
    ]
    chart = bar_chart("Model and baselines", [name for name, _ in everyone], series, x="", y="mean over targets")
    note = (
        f"{line}. Baselines are fitted on the same training events and read all events before a target. Minus the model: mean "
        "difference over the targets ± its standard error."
    )
    return [
        heading("Compared with baselines"),
        table(*baseline_table(results)),
        figure([chart], note, [name for name, _ in series]),
    ]


def baseline_table(results: Mapping[str, Any], short: bool = False) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the model and the baselines, one row each; `short`: without the measures of the lists."""
    label = results["protocol"]["label"]
    metrics = [f"{label}{name}@{SHOWN_AT}" for name in ("HR", "NDCG", "MRR")]
    lists = {} if short else {kind: f"{kind}@{SHOWN_AT}" for kind in ("coverage", "novelty", "diversity")}
    lists |= {} if short else {"serendipity": f"{label}serendipity@{SHOWN_AT}"}
    rows = []
    for one in (results, *results["baselines"]):
        minus = one.get("minus_model", {}).get(metrics[1])
        of_lists = [one[kind].get(name) for kind, name in lists.items()]
        rows.append(
            [
                one.get("name", "model"),
                *(f"{one['metrics'][name]:.4f}" for name in metrics),
                "" if minus is None else f"{minus[0]:+.4f} ± {minus[1]:.4f}",
                *("" if value is None else f"{value:.3f}" for value in of_lists),
                f"{one['fit_seconds']:.1f}" if "fit_seconds" in one else "",
            ]
        )
    return ["", *metrics, f"{metrics[1].partition('@')[0]} minus model", *lists.values(), "fit, s"], rows


def _by_history(groups: Sequence[Mapping[str, Any]], names: Sequence[str], line: str) -> list[str]:
    what = "By length of history"
    chart = group_chart(groups, names, what, "events before the target")
    grouped = _group_table(groups, names)
    if chart is None:
        return [heading(what), grouped, paragraph(f"{line}.{_small_note(groups)}", quiet=True)]
    return [heading(what), figure([chart, grouped], f"{line}.{_small_note(groups)}", names)]


def _by_popularity(groups: Sequence[Mapping[str, Any]], names: Sequence[str], line: str) -> list[str]:
    note = f"{line}. head, middle, tail: items with a third of the training events each.{_small_note(groups)}"
    return [heading("By popularity of the target"), _group_table(groups, names), paragraph(note, quiet=True)]


def _group_table(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    return table(*group_table(groups, names), faint=lambda row: is_small(groups[row]))


def _small_note(groups: Sequence[Mapping[str, Any]]) -> str:
    small = [group["group"] for group in groups if is_small(group)]
    return f" Grey, and in no chart: fewer than {FEW_TARGETS} targets ({', '.join(small)})." if small else ""


def _bias(bias: Mapping[str, Any], line: str) -> list[str]:
    lists = bias["share_of_recommendations"]
    k = f"@{SHOWN_AT}" if f"@{SHOWN_AT}" in lists else next(iter(lists))
    chart, names = popularity_chart(bias, k)
    return [figure([chart], f"Recommended items compared with the training events: {line}.", names)]


def metric_table(results: Mapping[str, Any], spread: bool = True) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the metrics: a row per metric, a column per cutoff; `spread` adds the standard errors."""
    metrics, errors, coverage = results["metrics"], results["standard_errors"], results["coverage"]
    label = results["protocol"]["label"]

    def cell(name: str) -> str:
        return f"{metrics[name]:.4f}" + (f" ± {errors[name]:.4f}" if spread and results["targets"] > 1 else "")

    rows = [[label + name, *(cell(f"{label}{name}@{k}") for k in CUTOFFS)] for name in ("HR", "NDCG", "MRR")]
    rows.append(["coverage", *(f"{value:.4f}" for value in coverage.values())])
    rows.append(["novelty", *(f"{value:.2f}" for value in results["novelty"].values())])
    rows.append([f"{label}serendipity", *(f"{value:.4f}" for value in results["serendipity"].values())])
    diversity = [results["diversity"].get(f"diversity@{k}") for k in CUTOFFS]
    if any(value is not None for value in diversity):
        rows.append(["diversity", *("" if value is None else f"{value:.4f}" for value in diversity)])
    rows.append([f"{label}AUC", cell(f"{label}AUC")])
    width = 1 + len(CUTOFFS)  # lists end where the catalogue does
    return ["at", *map(str, CUTOFFS)], [[*row, *[""] * (width - len(row))] for row in rows]


def group_table(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the groups, one row each; a single target has no standard error."""

    def cell(group: Mapping[str, Any], name: str) -> str:
        error = f" ± {group['standard_errors'][name]:.4f}" if group["targets"] > 1 else ""
        return f"{group['metrics'][name]:.4f}{error}"

    rows = [[group["group"], f"{group['targets']:,}", *(cell(group, name) for name in names)] for group in groups]
    return ["", "targets", *names], rows
