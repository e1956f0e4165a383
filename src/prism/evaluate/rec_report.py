"""The report on a recommender: one page that stands alone. What was ranked, and from what, is said beside every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prism.data.files import write_atomically
from prism.evaluate.page import commands, figure, heading, page, paragraph, table
from prism.evaluate.ranking import CUTOFFS
from prism.evaluate.rec_plots import by_group_picture, loss_picture, popularity_picture
from prism.evaluate.recommendation import protocol_line

SHOWN_AT = 10
"""The cutoff of pictures and of tables by group."""


def report(
    path: Path,
    results: Mapping[str, Any],
    *,
    title: str,
    command: str,
    about: Sequence[tuple[str, str]] = (),
    log: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page.

    Args:
        results: what `evaluate_split` returned.
        about: facts on model and data, for a table.
        log: records of the training run, for a picture of its loss.
    """
    line = protocol_line(results["protocol"])
    label = results["protocol"]["label"]
    body = [
        heading(title, 1),
        paragraph(f"{results['targets']:,} held-out events, each predicted once: {line}."),
        commands(command),
    ]
    if about:
        body.append(table(("", ""), about))
    body += [
        heading("Figures"),
        table(*figure_table(results)),
        paragraph(
            f"{line}. ± is the standard error over targets. HR: share of targets in the list; NDCG and MRR: more if "
            "further up; AUC: share of the other candidates placed below the target; coverage: share of all items in at "
            "least one list. Ties in scores count against the target.",
            quiet=True,
        ),
    ]
    names = [f"{label}{name}@{SHOWN_AT}" for name in ("HR", "NDCG")]
    for key, what, axis in (
        ("by_history_length", "By length of history", "events before the target (targets)"),
        (
            "by_popularity",
            "By popularity of the target",
            "popularity of the target, a third of the events each (targets)",
        ),
    ):
        body += [heading(what), table(*group_table(results[key], names))]
        if key == "by_history_length":
            body.append(figure(partial(by_group_picture, results[key], names, axis), f"{what}: {line}."))
        else:
            body.append(paragraph(f"{line}. head, middle, tail: items with a third of the training events each.", True))
    bias = results["popularity_bias"]
    k = (
        f"@{SHOWN_AT}"
        if f"@{SHOWN_AT}" in bias["share_of_recommendations"]
        else next(iter(bias["share_of_recommendations"]))
    )
    body += [
        heading("Popularity bias"),
        figure(
            partial(popularity_picture, bias, k),
            f"What is recommended against what happens in training: {line}.",
        ),
    ]
    if any("loss" in record for record in log):
        body += [heading("Training"), figure(partial(loss_picture, log), "Loss in nats per event, and validation.")]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(title, body))
    return path


def figure_table(results: Mapping[str, Any], spread: bool = True) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a metric a row, a cutoff a column; `spread` adds the standard errors."""
    metrics, errors, coverage = results["metrics"], results["standard_errors"], results["coverage"]
    label = results["protocol"]["label"]

    def cell(name: str) -> str:
        return f"{metrics[name]:.4f}" + (f" ± {errors[name]:.4f}" if spread else "")

    rows = [[label + name, *(cell(f"{label}{name}@{k}") for k in CUTOFFS)] for name in ("HR", "NDCG", "MRR")]
    rows.append(["coverage", *(f"{value:.4f}" for value in coverage.values())])
    rows.append([f"{label}AUC", cell(f"{label}AUC")])
    width = 1 + len(CUTOFFS)  # lists end where the catalogue does
    return ["at", *map(str, CUTOFFS)], [[*row, *[""] * (width - len(row))] for row in rows]


def group_table(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            group["group"],
            f"{group['targets']:,}",
            *(f"{group['metrics'][name]:.4f} ± {group['standard_errors'][name]:.4f}" for name in names),
        ]
        for group in groups
    ]
    return ["", "targets", *names], rows
