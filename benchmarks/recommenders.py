"""Compare recommenders on one data set: leave-one-out, full ranking, several seeds, the same budget for all.

    python benchmarks/recommenders.py ml-1m.txt --models sasrec hstu gated_delta prism-2 --seeds 0 1 2 --jobs 8
    python benchmarks/recommenders.py ml-1m.txt --models prism-2 prism-2@model.dropout=0.4 --validation-only

A model is a name in `MODELS`, any rule, or either with settings after an @, separated by commas; `--set` changes settings of
all. Compare variants with --validation-only, which never looks at a test event. Without it every run ends with one ranking of
the test events, by the weights that were best in validation. Runs share the device, `--jobs` at a time. Rows are written as
runs finish, so that an interrupted benchmark loses only unfinished runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from prism.lab.results import write_results

MODELS = {
    "sasrec": "preset=sasrec",
    "hstu": "preset=hstu",
    "prism-1": "model.layers=prism,model.options=prism.steps=1",
    "prism-2": "model.layers=prism,model.options=prism.steps=2",
    "prism-3": "model.layers=prism,model.options=prism.steps=3",
    "prism-paper-2": "model.layers=prism,model.options=prism.steps=2 prism.preset=paper",
}
FIGURES = ("HR@10", "NDCG@10")


def settings_of(source: str, model: str, seed: int, common: Sequence[str], out: Path) -> Any:
    """The settings of a run, from `name@setting=value,…`."""
    from prism.overrides import override, read_toml_value
    from prism.recommend.settings import preset

    name, _, changes = model.partition("@")
    words = [*common, *MODELS.get(name, f"model.layers={name}").split(","), *filter(None, changes.split(","))]
    chosen: dict[str, Any] = {"out": str(out), "seed": seed, "report": False, "data": {"source": source}}
    start = None
    for word in words:
        place, _, value = word.partition("=")
        if place == "preset":
            start = value
            continue
        section, _, key = place.rpartition(".")
        target = chosen.setdefault(section, {}) if section else chosen
        if key == "options":
            target[key] = [*target.get(key, []), *value.split()]
        else:
            target[key] = read_toml_value(value)
    return override(preset(start), chosen, model)


def run(job: tuple[str, str, int, tuple[str, ...], bool, int], out: Path | None = None) -> dict[str, Any]:
    """Train one model with one seed and, unless `validation_only`, rank the test events once.

    Args:
        out: run folder, which stays and in which a run that was stopped goes on. None: a temporary one.
    """
    source, model, seed, common, validation_only, threads = job
    import torch

    from prism.models import PrismForRecommendation
    from prism.recommend.events import open_dataset
    from prism.recommend.task import train_rec
    from prism.train.run import read_log

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(source, model, seed, common, out or Path(folder) / "run")
        outcome = train_rec(settings, report=lambda step, loss: None)
        trained = time.perf_counter() - started
        if outcome.model is None:
            raise RuntimeError(f"stopped after step {outcome.step}")
        records = read_log(outcome.run / "log.jsonl")
        curve = [r for r in records if "validation_NDCG@10" in r]
        best = max(curve, key=lambda r: r["validation_NDCG@10"])
        recommender = PrismForRecommendation.from_pretrained(outcome.model)
        parameters = sum(p.numel() for p in recommender.parameters())
        row: dict[str, Any] = {
            "model": model,
            "seed": seed,
            "parameters": parameters,
            "max_length": settings.data.length,
            "filter_seen": settings.validation.filter_seen,
            "best_step": best["step"],
            "last_step": curve[-1]["step"],
            "epochs": best.get("epoch"),
            "train_seconds": trained,
            "events_per_second": statistics.median(r["events_per_second"] for r in records if "events_per_second" in r),
            "validation": {name: best[f"validation_{name}"] for name in FIGURES},
            "curve": [[r["step"], r["validation_NDCG@10"]] for r in curve],
            "losses": [[r["step"], r["loss"]] for r in records if r.get("loss") is not None][::10],
        }
        if not validation_only:
            from prism.recommend.evaluate import evaluate_ranking

            split = settings.data.split_of(open_dataset(Path(source)).histories)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            found = evaluate_ranking(
                recommender.to(device).eval(),
                split.test,
                split.histories,
                max_length=settings.data.length,
                filter_seen=settings.validation.filter_seen,
            )
            row["test"] = {name: found["metrics"][name] for name in found["metrics"]}
        return row


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Means over seeds ± the standard error of the mean."""
    lines = [f"{'model':<44} {'part':<11}" + "".join(f"{name:>18}" for name in FIGURES) + "   seeds  steps  seconds"]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        for part in ("validation", "test"):
            chosen = [row[part] for row in mine if part in row]
            if not chosen:
                continue
            cells = ""
            for name in FIGURES:
                values = [row[name] for row in chosen]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
                cells += f"{statistics.mean(values):>9.4f} ±{error:7.4f}"
            steps = statistics.mean(row["best_step"] for row in mine)
            seconds = statistics.mean(row["train_seconds"] for row in mine)
            lines.append(f"{model:<44} {part:<11}{cells}   {len(chosen):>5}  {steps:>5.0f}  {seconds:7.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "events", help="events in any format that `prism train rec` reads, or a folder prepared from them"
    )
    parser.add_argument(
        "--models", nargs="+", default=["sasrec", "hstu", "linear", "mamba2", "gated_delta", *list(MODELS)[2:5]]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="settings of every run, such as data.length=200")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--validation-only", action="store_true", help="do not look at the test events")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "recommenders.json")
    arguments = parser.parse_args()

    from prism.recommend.events import EventRecipe, prepare_dataset

    dataset = prepare_dataset(EventRecipe(source=arguments.events))  # once, before the runs need it
    assert dataset.folder is not None
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    jobs = [
        (str(dataset.folder), model, seed, tuple(arguments.set), arguments.validation_only, threads)
        for seed in arguments.seeds
        for model in arguments.models
    ]
    command = shlex.join(["python", "benchmarks/recommenders.py", *sys.argv[1:]])
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(futures):
            _, model, seed, *_ = futures[future]
            try:
                rows.append(future.result())
                shown = json.dumps({part: rows[-1].get(part, {}).get("NDCG@10") for part in ("validation", "test")})
                print(f"{model} seed {seed}: {shown}, {rows[-1]['train_seconds']:.0f} s", flush=True)
            except Exception as error:  # one failed run must not stop the others
                failed.append({"model": model, "seed": seed, "error": f"{type(error).__name__}: {error}"})
                print(f"{model} seed {seed} failed: {failed[-1]['error']}", flush=True)
            write_results(arguments.output, {"rows": rows, "failed": failed}, command=command, data=dataset.digest)
    print(summary(sorted(rows, key=lambda row: arguments.models.index(row["model"]))))
    print("written to", arguments.output)


if __name__ == "__main__":
    main()
