"""`prism compare`: train the rules of a plan under one budget and report on them. Shared with `prism probe`."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from prism.files import check_target
from prism.lab.findings import Finding, Findings, findings, has_failed
from prism.lab.grid import RESULTS, Records, run_grid
from prism.lab.plan import Plan, read_plan
from prism.lab.report import write_report
from prism.lab.results import pyplot
from prism.messages import verbatim


def compare(
    file: Annotated[Positional[Path], arg(metavar="FILE.toml")],
    out: Path | None = None,
    jobs: int | None = None,
    retry: bool = False,
    only: str | None = None,
    seeds: tuple[int, ...] = (),
    minutes: float | None = None,
    dry_run: bool = False,
) -> int:
    """Compare rules under one budget: the same state, data and number of learning rates, several seeds.

    Parameters are equal too with budget.match = "parameters" in the plan; tables show them in any case.
    Start the same command again after an interrupt or a kill: finished runs are kept, none is repeated.

    Args:
        file: The plan. docs/howto/compare.md explains its keys.
        out: Folder for results.jsonl, report.html and pictures. None: runs/ and the file's name.
        jobs: Trainings side by side. None: the plan's number.
        retry: Repeat runs that failed.
        only: Regular expression; only runs whose name it finds, and those of the reference on the same tasks.
        seeds: Train with these of the plan's seeds alone; the report has all. None given: all.
        minutes: Stop after this time. Runs in progress are lost; the same command continues. None: no limit.
        dry_run: Show the runs with their parameters and state sizes, and train nothing.
    """
    out = check_target(Path("runs") / file.stem if out is None else out, folder=True, name="out")
    plan = read_plan(file)
    if only is not None:
        try:
            plan = plan.only(re.compile(only))
        except re.error as error:
            raise ValueError(f"--only must be a regular expression, got {only!r}: {error}") from error
    return run_plan(plan, out, jobs, retry, seeds, minutes, dry_run)


def run_plan(
    plan: Plan,
    out: Path,
    jobs: int | None = None,
    retry: bool = False,
    seeds: Sequence[int] = (),
    minutes: float | None = None,
    dry_run: bool = False,
) -> int:
    """Compute what is missing of a plan, print tables, and write the report."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be above 0, got {minutes:g}")
    wanted = plan.with_seeds(seeds) if seeds else plan
    console = Console() if sys.stdout.isatty() else Console(width=160)  # a log has room for whole tables
    records = Records(out / RESULTS)
    plan.check_results(records)
    if dry_run:
        console.print(_plan_table(wanted, records))
        print(f"{_runs(wanted.runs)}, {jobs or plan.jobs} side by side; results in {out / RESULTS}")
        return 0
    pyplot()  # fail now, not after the training, if matplotlib is missing
    try:
        left = run_grid(wanted.entries, records, jobs or plan.jobs, retry, math.inf if minutes is None else minutes)
        if left:
            print(f"stopped after {minutes:g} minutes with {_runs(left)} to go: the same command continues")
    finally:
        found = findings(plan, records)
        if any(finding.runs for finding in found.found):
            report = write_report(found, out)
            for task in plan.tasks:
                console.print(_fitting(found, task, console))
            for sentence in found.sentences():
                print(sentence)
            for finding in (one for task in plan.tasks for one in found.without_score(task)):
                print(f"{finding.entry.name}: no score, because runs failed")
            print(f"results: {out / RESULTS}\nreport: {report.resolve()}")
    failed = [line for finding in found.found for line in finding.failures if has_failed(line)]
    if failed:
        repeats = f"--retry repeats {'it' if len(failed) == 1 else 'them'}"
        print(f"{_runs(len(failed))} failed, the first with {failed[0]['error'].splitlines()[0]}; {repeats}")
    return 1 if failed else 0


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def _plan_table(plan: Plan, records: Records) -> Table:
    table = Table(title=verbatim([plan.title], "table.title")[0], header_style="bold")
    for column in ("task", "rule"):
        table.add_column(column)
    for column in ("parameters", "state size", "steps", "learning rates", "seeds", "runs", "finished"):
        table.add_column(column, justify="right")
    for entry in plan.entries:
        searched, rate = entry.search(), entry.rates.values[0]
        known = [
            *searched,
            *(entry.final(rate) if not searched else [t for r in entry.rates.values for t in entry.final(r)]),
        ]
        cells = [
            entry.task,
            entry.rule,
            f"{entry.parameters:,}",
            f"{entry.state_size:,}{' a token' if entry.grows else ''}",
            f"{entry.steps:,}",
            " ".join(f"{value:g}" for value in entry.rates.values),
            str(len(entry.seeds)),
            str(len(searched) + len(entry.seeds)),
            str(sum(records.status(training) == "done" for training in known)),
        ]
        table.add_row(*verbatim(cells))
    return table


def _fitting(found: Findings, task: str, console: Console) -> Table:
    """The table of a task with as many columns as fit: the report has all of them."""
    rows = found.task(task)
    others = list(dict.fromkeys(label for finding in rows for label in finding.labels))[1:]
    one_size = len({finding.entry.size for finding in rows}) == 1
    optional = ["parameters", "learning rate", "seeds", *["state size"] * one_size, *reversed(others)]
    unbounded = console.options.update(width=10**4)
    tables = (_task_table(found, task, optional[:number]) for number in range(len(optional) + 1))
    fitting = (one for one in tables if console.measure(one, options=unbounded).maximum <= console.width)
    return next(fitting, _task_table(found, task, optional))


def _task_table(found: Findings, task: str, leave_out: Sequence[str] = ()) -> Table:
    rows = found.task(task)
    metric = next((finding.first("metric", "score") for finding in rows), "score")
    labels = list(dict.fromkeys(label for finding in rows for label in finding.labels))
    title = verbatim([f"{task}: {metric}, mean ± standard error"], "table.title")[0]
    table = Table(title=title, header_style="bold")
    table.add_column("rule", overflow="fold")
    columns = ["parameters", "state size", "learning rate", *(label or metric for label in labels)]
    columns += [f"difference to\n{found.plan.reference}", "seeds"]
    kept = [place for place, column in enumerate(columns) if column not in leave_out]
    for column in verbatim(columns[place] for place in kept):
        table.add_column(column, justify="right", overflow="fold")

    def add(name: str, cells: Sequence[str], style: str | None = None) -> None:
        table.add_row(*verbatim([name, *(cells[place] for place in kept)]), style=style)

    for finding in rows:
        name, *cells = _task_row(found, finding, labels)
        add(name, cells)
    ceiling = {label: finding.first("ceiling", {}).get(label) for finding in rows for label in labels}
    baseline = {label: finding.first("baseline", {}).get(label) for finding in rows for label in labels}
    for name, values in (("ceiling", ceiling), ("baseline", baseline)):
        if any(value is not None for value in values.values()):
            shown = ["" if values[label] is None else f"{values[label]:.3f}" for label in labels]
            add(name, ["", "", "", *shown, "", ""], "dim")
    return table


def _task_row(found: Findings, finding: Finding, labels: list[str]) -> list[Any]:
    reference = found.reference(finding)
    return [
        finding.entry.rule,
        f"{finding.entry.parameters:,}",
        f"{finding.entry.state_size:,}{' a token' if finding.entry.grows else ''}",
        "" if finding.rate is None else f"{finding.rate:g}",
        *(finding.score_text(label) for label in labels),
        "" if reference is None else finding.difference_text(reference, labels[0]),
        finding.seeds,
    ]
