"""A log that is larger than memory: write it as parquet parts, prepare it, train some steps; seconds and memory of each.

    python benchmarks/large_log.py --events 100_000_000 --folder /tmp/large --limit 8

The synthetic events are of users who stay in a cluster of items for a while; a part is written at a time. Writing, preparing
and training each run in a process of their own, whose largest resident memory (mapped files and children included) is
reported. Everything is removed at the end. `--limit` (GiB) makes the command fail if preparing took more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from prism.lab.results import machine, write_results

PARTS = "parts"
CLUSTERS = 1000


def write(folder: Path, events: int, users: int, items: int, parts: int) -> dict[str, Any]:
    """Write the parts; events are in the order of their times."""
    import polars as pl

    (folder / PARTS).mkdir(parents=True)
    each = -(-events // parts)
    for part in range(parts):
        random = np.random.default_rng(part)
        count = min(each, events - part * each)
        who = random.integers(0, users, count)
        cluster = (who * 7919 + part // 10) % CLUSTERS  # a user's cluster changes with time
        within = (random.random(count) ** 3 * (items // CLUSTERS)).astype(np.int64)
        when = part * each + np.arange(count)
        frame = pl.DataFrame({"user_id": who, "item_id": cluster * (items // CLUSTERS) + within, "timestamp": when})
        frame.write_parquet(folder / PARTS / f"part-{part:05d}.parquet")
    size = sum(path.stat().st_size for path in (folder / PARTS).iterdir())
    return {"events": events, "parts": parts, "parquet_gib": size / 2**30}


def prepare(folder: Path) -> dict[str, Any]:
    """Prepare the parts once; the folder of the arrays."""
    from prism.recommend.events import EventRecipe, prepare_dataset

    dataset = prepare_dataset(EventRecipe(source=str(folder / PARTS)), folder / "cache", report=print)
    assert dataset.folder is not None
    size = sum(path.stat().st_size for path in dataset.folder.iterdir())
    return {"summary": dataset.summary(), "prepared_gib": size / 2**30}


def train(folder: Path, steps: int) -> dict[str, Any]:
    """Train with sampled negatives; the mean loss of the first and of the last steps."""
    from prism.overrides import override
    from prism.recommend.settings import RecSettings
    from prism.recommend.task import train_rec

    losses: list[float] = []
    settings = {
        "out": str(folder / "run"),
        "steps": steps,
        "device": "cpu",
        "report": False,
        "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 1, "layers": "gated_delta"},
        "data": {"source": str(folder / PARTS), "cache": str(folder / "cache"), "length": 50},
        "loss": {"name": "sampled_softmax", "count": 1024, "negatives": "popularity"},
        "batch": {"sequences": 128},
        "validation": {"every": 0, "epochs": 0.0, "sequences": 200, "patience": 0},
        "checkpoint": {"every": 0},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 5},
    }
    outcome = train_rec(override(RecSettings(), settings, "settings"), report=lambda step, loss: losses.append(loss))
    few = max(1, steps // 5)
    return {
        "steps": outcome.step,
        "first_losses": float(np.mean(losses[:few])),
        "last_losses": float(np.mean(losses[-few:])),
        "validation": outcome.score["NDCG@10"],
    }


def measured(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The result of a function with its seconds and the largest memory of this process and its children."""
    started = time.perf_counter()
    result = function(*arguments)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {**result, "seconds": time.perf_counter() - started, "peak_gib": peak / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000_000)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder; it is removed at the end")
    parser.add_argument("--limit", type=float, help="GiB that preparing may take")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "large_log.json")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        raise SystemExit(f"{arguments.folder} exists already: give a new folder")
    jobs: dict[str, tuple[Any, ...]] = {
        "write": (write, arguments.folder, arguments.events, arguments.users, arguments.items, arguments.parts),
        "prepare": (prepare, arguments.folder),
        "train": (train, arguments.folder, arguments.steps),
    }
    found: dict[str, Any] = {}
    try:
        for name, job in jobs.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found[name] = pool.submit(measured, *job).result()
            print(name, found[name], flush=True)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    command = shlex.join(["python", "benchmarks/large_log.py", *sys.argv[1:]])
    write_results(arguments.output, {**found, "machine": machine()}, command=command)
    if arguments.limit is not None and found["prepare"]["peak_gib"] > arguments.limit:
        raise SystemExit(f"preparing took {found['prepare']['peak_gib']:.1f} GiB, more than {arguments.limit:g}")


if __name__ == "__main__":
    main()
