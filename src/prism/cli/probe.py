"""`prism probe mqar`: what a memory of a given size can recall."""

from __future__ import annotations

import ast
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from prism import rules as registry
from prism.files import check_target
from prism.probes.jobs import run_jobs
from prism.probes.mqar import Recall, RecallRun, train_recall
from prism.reports.plots import pyplot, recall_picture
from prism.reports.results import write_results

SETTINGS = {
    "easy": RecallRun("", Recall(pairs=8, length=32), key_dim=16, steps=600, batch=64, test_pairs=(2, 4, 6, 8)),
    "starved": RecallRun("", Recall(pairs=16, length=64), key_dim=8, steps=900, batch=32, test_pairs=(4, 8, 12, 16)),
}
"""Room to spare, and twice as many pairs as the keys have dimensions."""


def mqar(
    rules: tuple[str, ...] = ("linear", "gated_delta", "prism:steps=2"),
    setting: Literal["easy", "starved", "both"] = "both",
    seeds: int = 1,
    pairs: int | None = None,
    key_dim: tuple[int, ...] = (),
    layers: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    jobs: int | None = None,
    output: Path = Path("runs/mqar"),
) -> None:
    """Train small models on multi-query associative recall and show how many pairs a memory of fixed size holds.

    Args:
        rules: the rules to compare, with options after a colon: `prism:steps=3,preset=paper`.
        setting: `easy` has room to spare, `starved` twice as many pairs as key dimensions.
        seeds: models trained for each rule and setting; the picture shows their mean and span.
        pairs: pairs a sequence shows, instead of the setting's (its length grows to 4 · pairs).
        key_dim: key widths to try, instead of the setting's one: state size is key width · value width · layers.
        layers: layers of the model, instead of the setting's.
        steps: training steps, instead of the setting's.
        learning_rate: peak learning rate, instead of the setting's.
        jobs: runs at a time; one a core unless given.
        output: folder for results.json, which has every model as soon as it is trained, and recall.png.
    """
    if not rules:
        raise ValueError(f"rules is empty: name one or more of {', '.join(registry.names())}")
    least = {"seeds": seeds, "pairs": pairs, "layers": layers, "steps": steps, "jobs": jobs}
    for what, number in [*least.items(), *(("key_dim", width) for width in key_dim)]:
        if number is not None and number < 1:
            raise ValueError(f"{what} must be at least 1, got {number}")
    pyplot()  # a missing plotting library should be known now, not after the training
    check_target(output, folder=True)
    runs, labels = [], []
    for name in ("easy", "starved") if setting == "both" else (setting,):
        base = SETTINGS[name]
        if pairs is not None:
            task = Recall(pairs, max(base.task.length, 4 * pairs))
            base = replace(base, task=task, test_pairs=tuple(sorted({max(1, pairs * i // 4) for i in (1, 2, 3, 4)})))
        chosen: dict[str, Any] = {"layers": layers, "steps": steps, "learning_rate": learning_rate}
        base = replace(base, **{k: v for k, v in chosen.items() if v is not None})
        for text in rules:
            rule, options = parse_rule(text)
            for width in key_dim or (base.key_dim,):
                for seed in range(seeds):
                    runs.append(replace(base, rule=rule, options=options, label=text, key_dim=width, seed=seed))
                    labels.append(name)
    check_runs(runs)
    started = time.perf_counter()
    names = [f"{label} {run.name} seed {run.seed}" for label, run in zip(labels, runs, strict=True)]
    data, results = output / "results.json", list[dict[str, Any]]()

    def keep(found: list[Any]) -> None:  # as they come: an interrupt loses only what is under way
        results[:] = [{"setting": label, **result} for label, result in zip(labels, found, strict=True) if result]
        write_results(data, results, command=shlex.join(["prism", *sys.argv[1:]]))

    run_jobs(train_recall, runs, names, [run.steps for run in runs], jobs, keep)
    Console().print(_table(results))
    recall_picture(results, output / "recall.png")
    print(f"{len(runs)} models in {time.perf_counter() - started:.0f} s; figures in {data}")
    print(f"picture: {(output / 'recall.png').resolve()}")


def parse_rule(text: str) -> tuple[str, dict[str, Any]]:
    """`prism:steps=3,preset=paper` → the name and its options, numbers and booleans as Python writes them."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"rule option {item!r} in {text!r} must look like name=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def check_runs(runs: list[RecallRun]) -> None:
    """Build every model once, so that a wrong name or option is told before anything is trained."""
    from prism.probes.mqar import RecallModel

    for run in runs:
        RecallModel(run)


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="Associative recall: accuracy by rule and state size", header_style="bold")
    for column in ("setting", "rule"):
        table.add_column(column)
    for column in ("pairs", "state size", "parameters", "accuracy", "seeds"):
        table.add_column(column, justify="right")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["setting"], result["name"], result["state_size"]), []).append(result)
    for (setting, name, size), group in groups.items():
        accuracy = [result["accuracy"] for result in group]
        table.add_row(
            setting,
            name,
            str(group[0]["task"]["pairs"]),
            f"{size:,}",
            f"{group[0]['parameters']:,}",
            f"{sum(accuracy) / len(accuracy):.3f}",
            " ".join(f"{a:.3f}" for a in accuracy),
        )
    return table
