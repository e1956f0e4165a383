"""`prism evaluate rec`: ranking metrics of a recommender on held-out events."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table
from tyro.conf import Positional

from prism.files import check_target
from prism.lab.recommender import FEW_TARGETS, SHOWN_AT, baseline_table, group_table, is_small, metric_table
from prism.lab.recommender import report as write_report
from prism.lab.results import write_results
from prism.messages import progress_bars, say, verbatim
from prism.models import PrismForRecommendation
from prism.models.loading import open_weights
from prism.recommend.baselines.compare import compare_baselines, named
from prism.recommend.evaluate import Sampled, measure_split, protocol_line
from prism.recommend.events import Dataset
from prism.recommend.saved import model_folder, training_of
from prism.train.run import read_log

_MANY_REPEATS = 0.05
"""Fraction of targets seen before above which leaving out seen items flatters the model."""


def evaluate_rec(
    model: Positional[Path],
    data: str | None = None,
    split: Literal["test", "validation"] = "test",
    max_length: int | None = None,
    filter_seen: bool = True,
    sampled: int | None = None,
    sampled_by: Literal["uniform", "popularity"] = "uniform",
    baselines: tuple[str, ...] = (),
    batch: int = 256,
    output: Path | None = None,
    device: str = "auto",
) -> None:
    """Rank held-out events among all items: HR, NDCG, MRR, AUC; coverage, novelty and diversity of the lists.

    Args:
        model: folder of a saved recommender, or run folder of `prism train rec`.
        data: other events to evaluate on, read and split in the same way. None: the held-out events of the training data.
            Events of items that the model does not know are dropped and counted.
        split: which held-out events to rank.
        max_length: most events of a history to read. None: as many as in training.
        filter_seen: leave out items that the user already had (the target is always ranked).
        sampled: rank the target among this many sampled items instead of all.
            Such metrics are labelled "sampled"; do not compare them with full ones.
        sampled_by: how the other items are sampled.
        baselines: cheap recommenders to fit on the training events and to rank in the same way: popular, recent_popular,
            item_knn, ease, als, bpr (the last two need the extra baselines), or all. Options in brackets:
            'ease(regularization=100)'.
        batch: targets at once; changes memory and speed, not the result.
        output: folder for results.json (with command and machine) and report.html.
        device: cpu, cuda, cuda:1 … auto: cuda if available.
    """
    if output is not None:
        check_target(output, folder=True)
    among, rivals = None if sampled is None else Sampled(sampled, sampled_by), named(baselines)
    for name, value in (("max_length", max_length), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    with model_folder(model, say) as folder:
        recommender = open_weights(PrismForRecommendation, folder, device)
        training = training_of(folder)
    dataset = training.dataset(say) if data is None else training.other_dataset(data, say)
    if data is not None:
        for note in dataset.manifest.get("notes", []):
            say(note)
    with progress_bars(MofNCompleteColumn()) as progress:
        bar = progress.add_task(f"ranking {split} events")
        held_out = training.data.split_of(dataset.histories)
        how: dict[str, Any] = {
            "max_length": recommender.config.max_length if max_length is None else max_length,
            "filter_seen": filter_seen,
            "batch": batch,
            "sampled": among,
            "progress": lambda done, total: progress.update(bar, completed=done, total=total),
        }
        ranking, results = measure_split(recommender, held_out, split, **how)
        if rivals:
            results["baselines"] = compare_baselines(
                rivals,
                held_out,
                dataset.num_items,
                split,
                ranking,
                lambda name: progress.reset(bar, description=name),
                **how,
            )
    show(results)
    again = results["protocol"]["targets_seen_before"]
    if filter_seen and again > results["targets"] * _MANY_REPEATS:
        say(
            f"note: {again / results['targets']:.0%} of the targets were seen before, while other seen items are left out: "
            "--no-filter-seen ranks all of them"
        )
    if output is not None:
        command = shlex.join(["prism", *sys.argv[1:]])
        print("written to", write_results(output / "results.json", results, command=command, model=str(model)))
        run = _run_of(model)
        page = write_report(
            output / "report.html",
            results,
            title=f"Recommender {(run or model.resolve()).name}",
            command=command,
            about=_about(recommender, dataset, results, dataset.digest == training.facts["digest"]),
            log=[] if run is None else read_log(run / "log.jsonl"),
        )
        print("report:", page)


def show(results: Mapping[str, Any]) -> None:
    """Print the metrics, each table with its protocol."""
    console, line = Console(highlight=False), protocol_line(results["protocol"])
    metrics, errors, label = results["metrics"], results["standard_errors"], results["protocol"]["label"]
    names = [f"{label}{name}@{SHOWN_AT}" for name in ("HR", "NDCG")]
    overall = _table(f"{results['targets']:,} held-out events", *metric_table(results, spread=False))
    if results["targets"] > 1:
        overall.caption = ", ".join(f"{name} {metrics[name]:.4f} ± {errors[name]:.4f}" for name in names)
    by_length = results["by_history_length"]
    grouped = _table("By events before the target", *group_table(by_length, names))
    if any(map(is_small, by_length)):
        grouped.caption = f"grey: fewer than {FEW_TARGETS} targets, too few to compare"
    for row, group in zip(grouped.rows, by_length, strict=True):
        row.style = "dim" if is_small(group) else None
    tables = [overall, grouped]
    if results.get("baselines"):
        tables.append(_table("Compared with baselines", *baseline_table(results, short=True)))
    for table in tables:
        console.print(table)
        console.print(line, style="dim")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*verbatim(row))
    return table


def _about(
    model: PrismForRecommendation, dataset: Dataset, results: Mapping[str, Any], of_training: bool
) -> list[tuple[str, str]]:
    def counted(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items() if value)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [
        ("model", f"{model.config.num_hidden_layers} layers of {model.config.layers}, {parameters:,} parameters"),
        ("training events" if of_training else "other events", counted(dataset.manifest.get("counts", {}))),
        ("split", counted(results["split"])),
        *(("note", note) for note in dataset.manifest.get("notes", [])),
    ]


def _run_of(model: Path) -> Path | None:
    """The run folder that a path is, or whose model it is."""
    return next((path for path in (model.resolve(), model.resolve().parent) if (path / "log.jsonl").is_file()), None)
