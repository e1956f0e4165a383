"""`prism evaluate lm`: perplexity on files and where it comes from, LAMBADA, and lm-eval tasks from local data."""

from __future__ import annotations

import os
import shlex
import string
import sys
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TaskProgressColumn, TextColumn
from rich.table import Table
from tyro.conf import Positional, arg

from prism.files import check_target
from prism.lab.results import write_results
from prism.language.adapted import with_adapter
from prism.language.breakdown import RARE, Breakdown, count_bigrams
from prism.language.corpus import Corpus, open_corpus
from prism.language.export import write_model
from prism.language.generate import LanguageModel, open_model
from prism.language.harness import run_tasks
from prism.language.lambada import lambada as last_words
from prism.language.lambada import read_passages
from prism.language.perplexity import Context, Tally, count_bytes, score_file
from prism.language.text import find_files
from prism.language.tokenizer import load_tokenizer
from prism.messages import progress_bars, say, verbatim
from prism.train.export import resolve_model_folder


def evaluate_lm(
    model: Annotated[Positional[Path], arg(metavar="MODEL")],
    files: Annotated[Positional[tuple[str, ...]], arg(metavar="[FILE ...]")] = (),
    context: int | None = None,
    stride: int | None = None,
    segment: int = 2048,
    field: str = "text",
    tasks: tuple[str, ...] = (),
    data_dir: Path | None = None,
    limit: int | None = None,
    batch: int = 8,
    positions: bool = False,
    train_tokens: Path | None = None,
    rare: int = RARE,
    lambada: Path | None = None,
    adapter: Path | None = None,
    output: Path | None = None,
    device: str = "auto",
) -> None:
    """Measure a language model: perplexity on files, by position and on repeated bigrams, LAMBADA, and lm-eval tasks.

    Args:
        model: Folder of a saved model, or run folder of `prism train lm`.
        files: Text, jsonl or parquet files (also .gz and .xz), or folders of them.
        context: Predict each token from at most this many tokens before it. None: from its whole document.
        stride: Tokens between the starts of two contexts. None: as many as --context.
        segment: Tokens per forward pass without --context; affects memory and speed, not the result.
        field: Column of jsonl and parquet files that holds the text.
        tasks: Names of lm-eval tasks, such as lambada_openai piqa hellaswag (needs the extra eval).
        data_dir: Folder with the tasks' data: TASK.jsonl or TASK.jsonl.xz.
        limit: Maximum number of rows per task. None: all.
        batch: Batch size: contexts, or rows of a task.
        positions: Also show the loss by position in the document, in bins that end at powers of two.
        train_tokens: Folder of the prepared tokens that the model was trained on. With it the loss on repeated rare
            bigrams is shown, where a model can only recall what it read in the document, and the loss on the rest.
        rare: A bigram is rare if the training tokens hold it at most this many times.
        lambada: LAMBADA as a jsonl file with the field text: accuracy on the last word of each passage.
        adapter: Folder of a saved adapter of the model, or run folder that trains one.
        output: Write the results, the command and the machine to this JSON file.
        device: cpu, cuda, cuda:1 and so on. auto: cuda if available, else cpu.
    """
    if not files and not tasks and lambada is None:
        raise ValueError("nothing to evaluate: give files, --lambada, or --tasks with --data-dir")
    if (positions or train_tokens is not None) and not files:
        raise ValueError("--positions and --train-tokens break down the loss on files: give files")
    if tasks and data_dir is None:
        raise ValueError("--tasks needs --data-dir, the folder with the tasks' data")
    if output is not None:
        check_target(output, folder=False)
    how, results = Context(context, stride, segment, batch), dict[str, Any]()
    sizes = {path: count_bytes(path, field) for path in find_files(files)}
    corpus = None if train_tokens is None else open_corpus(train_tokens)
    passages = None if lambada is None else read_passages(lambada, limit)
    with resolve_model_folder(model, write_model, say) as folder:
        lm = open_model(folder, device)
        if adapter is not None:
            lm = with_adapter(lm, adapter)
        breakdown = Breakdown() if positions or corpus is not None else None
        if corpus is not None:
            _check_tokenizer(lm, corpus)
        if sizes:
            results["files"] = _files(lm, sizes, how, field, breakdown)
            Console().print(_file_table(results["files"]))
        if breakdown is not None and positions:
            results["positions"] = breakdown.positions()
            Console().print(_position_table(results["positions"]))
        if breakdown is not None and corpus is not None:
            codes = breakdown.repeated_bigrams()
            results["bigrams"] = breakdown.rare_bigrams(codes, count_bigrams(corpus.stream("train"), codes), rare)
            Console().print(_bigram_table(results["bigrams"]))
        if passages is not None:
            results["lambada"] = last_words(lm.model, lm.tokenizer, passages, batch)
            Console().print(_task_table({"lambada": results["lambada"]}, "Last word of a passage"))
        if tasks and data_dir is not None:
            results["tasks"] = run_tasks(lm, folder, tasks, data_dir, limit, batch)
            Console().print(_task_table(results["tasks"]))
    if output is not None:
        command = shlex.join(["prism", *sys.argv[1:]])
        used = {"model": str(model), **({} if adapter is None else {"adapter": str(adapter)})}
        print("written to", write_results(output, results, command=command, **used, context=context))


def _check_tokenizer(lm: LanguageModel, corpus: Corpus) -> None:
    """Raise ValueError for training tokens of another tokenizer."""
    theirs = load_tokenizer(corpus.tokenizer_file, corpus.manifest.end_token)
    sample = string.printable
    if (
        theirs.size != lm.tokenizer.size
        or theirs.encode([sample])[0].tolist() != lm.tokenizer.encode([sample])[0].tolist()
    ):
        raise ValueError(
            f"the tokens in {corpus.folder} are of another tokenizer than the model's: give those it was trained on"
        )


def _files(
    lm: LanguageModel, sizes: dict[Path, int], how: Context, field: str, breakdown: Breakdown | None
) -> dict[str, Any]:
    """Results by file name, and `total` if there are several files. `sizes` are the bytes of text in each."""
    if how.context is None and not lm.model.config.constant_state:
        say("note: some layers keep every token: memory grows with document length")
    total, results = Tally(), dict[str, Any]()
    with progress_bars(TaskProgressColumn(), TextColumn("{task.fields[score]} nats")) as progress:
        for path, size in sizes.items():
            bar = progress.add_task(path.name, total=None, score="")

            def report(tally: Tally, stream: Any, bar: Any = bar, size: int = size) -> None:
                whole = stream.tokens * size / max(1, stream.text_bytes)  # estimate of all tokens
                progress.update(bar, completed=tally.tokens, total=whole, score=f"{tally.nats / tally.tokens:.4f}")

            tally = score_file(lm, path, how, field, report, breakdown)
            results[str(path)] = tally.result()
            total.add(tally)
    return {**results, "total": total.result()} if len(results) > 1 else results


def _file_table(results: dict[str, Any]) -> Table:
    """One row per file. Names omit the folder that all files share and columns are narrow, to fit 80 columns."""
    table = Table(title="Perplexity (ppl)", header_style="bold", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("file", overflow="fold")
    for column in (
        "docu-\nments",
        "tokens",
        "bytes",
        "nats/\ntoken",
        "ppl/\ntoken",
        "ppl/\nword",
        "bits/\nbyte",
    ):
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    shared = os.path.commonpath([Path(name).parent for name in results if name != "total"])
    for name, r in results.items():
        counts = [f"{r[key]:,}" for key in ("documents", "tokens", "text_bytes")]
        cells = [
            name if name == "total" else os.path.relpath(name, shared or "."),
            *counts,
            f"{r['nats_per_token']:.4f}",
            _short(r["perplexity"]),
            _short(r["perplexity_per_word"]),
            f"{r['bits_per_byte']:.4f}",
        ]
        table.add_row(*verbatim(cells))
    return table


def _short(perplexity: float | None) -> str:
    """A perplexity in at most eight characters, mostly fewer."""
    if perplexity is None:
        return "–"
    return f"{perplexity:.5g}" if perplexity < 1e5 else f"{perplexity:.1e}"


def _position_table(bins: list[dict[str, Any]]) -> Table:
    """One row per bin of positions."""
    table = Table(title="Loss by position in the document", header_style="bold", box=SIMPLE_HEAD)
    for column in ("positions", "tokens", "nats/token"):
        table.add_column(column, justify="right")
    for found in bins:
        last = found["up_to"]
        where = f"{last:,}" if last < 3 else f"{last // 2 + 1:,}-{last:,}"
        table.add_row(where, f"{found['tokens']:,}", f"{found['nats_per_token']:.4f}")
    return table


def _bigram_table(found: dict[str, Any]) -> Table:
    """Repeated rare bigrams, and the rest."""
    title = f"Repeated bigrams that training had at most {found['rare']} times, and all other tokens"
    table = Table(title=title, header_style="bold", box=SIMPLE_HEAD)
    for column in ("", "tokens", "nats/token"):
        table.add_column(column, justify="right" if column else "left")
    for name, key in {"repeated rare bigrams": "repeated_rare", "the rest": "rest"}.items():
        nats = found[key]["nats_per_token"]
        table.add_row(name, f"{found[key]['tokens']:,}", "" if nats is None else f"{nats:.4f}")
    return table


def _task_table(results: dict[str, Any], title: str = "lm-eval tasks") -> Table:
    """One row per task and metric."""
    table = Table(title=title, header_style="bold")
    for column in ("task", "metric"):
        table.add_column(column)
    for column in ("value", "± standard error", "rows"):
        table.add_column(column, justify="right")
    for task, metrics in results.items():
        for name, value in metrics.items():
            if name != "rows" and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                shown = "" if error is None else f"{error:.4f}"
                table.add_row(*verbatim([task, name, f"{value:.4f}", shown, str(metrics["rows"])]))
    return table
