"""Run lm-eval tasks on local files, without network or downloads.

For each task a small YAML file includes lm-eval's task and points its data at a local file; prompts, answers and metrics
are lm-eval's. The local file has the rows of the split that the task is evaluated on.
"""

from __future__ import annotations

import json
import logging
import lzma
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prism.language.generate import LanguageModel
from prism.messages import install

ENDINGS = (".jsonl", ".json", ".jsonl.xz", ".json.xz")


def run_tasks(
    lm: LanguageModel,
    folder: Path,
    tasks: Sequence[str],
    data: Path,
    limit: int | None = None,
    batch: int = 8,
    max_length: int = 2048,
) -> dict[str, dict[str, Any]]:
    """Metrics by task.

    Args:
        folder: the model folder, for its tokenizer.
        tasks: lm-eval names.
        data: a folder with one file per task, see `find_data`.
        limit: maximum number of rows per task.
        batch: batch size.
        max_length: maximum number of tokens of a question; longer ones are truncated on the left.
    """
    files = {task: find_data(data, task) for task in tasks}  # before the slow imports
    evaluator = _import_lm_eval()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    stock = {task: _stock_task(task) for task in tasks}
    wrapped = HFLM(
        pretrained=lm.model,
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        batch_size=batch,
        max_length=max_length,
    )
    with tempfile.TemporaryDirectory() as scratch:
        for task in tasks:
            _write_task(task, stock[task], files[task], Path(scratch))
        manager = TaskManager(include_path=scratch, include_defaults=False)
        results = evaluator.simple_evaluate(
            model=wrapped,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return {task: _metrics(results, task) for task in tasks}


def find_data(folder: Path, task: str) -> Path:
    """The file of a task: for lambada_openai `lambada_openai.jsonl` or `lambada.jsonl`, also .json and .xz."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no data folder {folder}")
    parts = task.split("_")
    for count in range(len(parts), 0, -1):
        for ending in ENDINGS:
            path = folder / ("_".join(parts[:count]) + ending)
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"{folder} has no data for the task {task}: it needs a file {task}.jsonl or {task}.jsonl.xz"
    )


def _import_lm_eval() -> Any:
    """lm-eval's evaluator, with only errors logged."""
    try:
        from lm_eval import evaluator
    except ImportError as error:
        raise ImportError(f"lm-eval tasks need the extra eval: {install('eval')}") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return evaluator


def _stock_task(task: str) -> Path:
    """The file that defines a task. lm-eval's index would take half a minute to parse all 14,000 tasks."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent
    line = re.compile(rb"^task: *[\"']?" + re.escape(task.encode()) + rb"[\"']? *$", re.MULTILINE)
    for paths in (folder.rglob(f"{task}.yaml"), folder.rglob("*.yaml")):
        for path in sorted(paths):
            if line.search(path.read_bytes()):
                return path
    raise ValueError(f"lm-eval has no task {task!r} that is defined in one file")


def _write_task(task: str, stock: Path, source: Path, folder: Path) -> None:
    """Write a task of the same name that reads `source` instead of a hub dataset."""
    rows = folder / f"{task}.jsonl"
    with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as packed, rows.open("wb") as plain:
        try:
            shutil.copyfileobj(packed, plain)
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{source} is damaged: {error}") from error
    changes = {
        "include": str(stock),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "validation_split": None,
        "training_split": None,
        "fewshot_split": None,
    }
    (folder / f"{task}.yaml").write_text(json.dumps(changes))  # JSON is YAML


def _metrics(results: dict[str, Any], task: str) -> dict[str, Any]:
    """The metrics of a task (`acc,none` becomes acc) and the number of rows."""
    named = {key.removesuffix(",none"): value for key, value in results["results"][task].items()}
    numbers = {key: value for key, value in named.items() if isinstance(value, float)}
    return {**numbers, "rows": results["n-samples"][task]["effective"]}
