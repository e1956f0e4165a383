"""`prism evaluate lm`: perplexity on files, tasks from local data."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TaskProgressColumn, TextColumn
from rich.table import Table
from tyro.conf import Positional

from prism.files import check_target
from prism.language.export import write_model
from prism.language.generate import LanguageModel, open_model
from prism.language.harness import run_tasks
from prism.language.perplexity import Context, Tally, count_bytes, score_file
from prism.language.text import find_files
from prism.messages import progress_bars, say
from prism.reports.results import write_results
from prism.train.export import model_folder


def evaluate_lm(
    model: Positional[Path],
    files: Positional[tuple[str, ...]] = (),
    context: int | None = None,
    stride: int | None = None,
    segment: int = 2048,
    field: str = "text",
    tasks: tuple[str, ...] = (),
    data_dir: Path | None = None,
    limit: int | None = None,
    batch: int = 8,
    output: Path | None = None,
    device: str = "auto",
) -> None:
    """Measure a language model: how well it predicts files, and how well it does lm-eval's tasks.

    Args:
        model: a folder with a saved model, or a run folder of `prism train lm`.
        files: text, jsonl or parquet files or folders of them (.gz and .xz too).
        context: predict every token from at most this many before it; None: from all of its document, through the state.
        stride: tokens from the start of one window to the next; `context` unless given.
        segment: tokens read at once where the state is handed on; changes memory and speed, not the result.
        field: the column of jsonl and parquet files that holds the text.
        tasks: names of lm-eval tasks, such as lambada_openai piqa hellaswag (extra `eval`).
        data_dir: where the tasks' rows are: TASK.jsonl or TASK.jsonl.xz.
        limit: use only this many rows of each task.
        batch: windows, or questions of a task, at once.
        output: write the results, with command and machine, to this JSON file.
        device: cpu, cuda …; auto is cuda where there is one.
    """
    if not files and not tasks:
        raise ValueError("nothing to evaluate: give files, or --tasks with --data-dir")
    if tasks and data_dir is None:
        raise ValueError("--tasks needs --data-dir, the folder with their rows")
    if output is not None:
        check_target(output, folder=False)
    how, results = Context(context, stride, segment, batch), dict[str, Any]()
    sizes = {path: count_bytes(path, field) for path in find_files(files)}
    with model_folder(model, write_model, say) as folder:
        lm = open_model(folder, device)
        if sizes:
            results["files"] = _files(lm, sizes, how, field)
            Console().print(_file_table(results["files"]))
        if tasks and data_dir is not None:
            results["tasks"] = run_tasks(lm, folder, tasks, data_dir, limit, batch)
            Console().print(_task_table(results["tasks"]))
    if output is not None:
        command = shlex.join(["prism", *sys.argv[1:]])
        print("written to", write_results(output, results, command=command, model=str(model), context=context))


def _files(lm: LanguageModel, sizes: dict[Path, int], how: Context, field: str) -> dict[str, Any]:
    if how.context is None and not lm.model.config.constant_state:
        say("note: some layers keep every token, so memory grows with the documents")
    total, results = Tally(), dict[str, Any]()
    with progress_bars(TaskProgressColumn(), TextColumn("{task.fields[score]} nats")) as progress:
        for path, size in sizes.items():
            bar = progress.add_task(path.name, total=None, score="")

            def report(tally: Tally, stream: Any, bar: Any = bar, size: int = size) -> None:
                whole = stream.tokens * size / max(1, stream.text_bytes)  # of the tokens, as far as one can tell
                progress.update(bar, completed=tally.tokens, total=whole, score=f"{tally.nats / tally.tokens:.4f}")

            tally = score_file(lm, path, how, field, report)
            results[str(path)] = tally.result()
            total.add(tally)
    return {**results, "total": total.result()} if len(results) > 1 else results


def _file_table(results: dict[str, Any]) -> Table:
    """Figures by file. Names are shown without the folder that all files share, and figures take little room, so that
    names stay whole in a terminal of 80 columns."""
    table = Table(title="Prediction of text", header_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("file", overflow="fold")
    for column in ("docu-\nments", "tokens", "bytes", "nats/\ntoken", "perplexity", "bits/\nbyte"):
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    shared = os.path.commonpath([Path(name).parent for name in results if name != "total"])
    for name, r in results.items():
        counts = [f"{r[key]:,}" for key in ("documents", "tokens", "text_bytes")]
        table.add_row(
            name if name == "total" else os.path.relpath(name, shared or "."),
            *counts,
            f"{r['nats_per_token']:.4f}",
            f"{r['perplexity']:.3f}",
            f"{r['bits_per_byte']:.4f}",
        )
    return table


def _task_table(results: dict[str, Any]) -> Table:
    table = Table(title="lm-eval tasks", header_style="bold")
    for column in ("task", "metric"):
        table.add_column(column)
    for column in ("value", "± standard error", "rows"):
        table.add_column(column, justify="right")
    for task, metrics in results.items():
        for name, value in metrics.items():
            if name != "rows" and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}", str(metrics["rows"]))
    return table
