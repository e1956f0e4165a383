"""The best recommender on MovieLens-1M: candidates compared on validation, the best one tested with several seeds.

    python experiments/recommend.py prepare DATA PREPARED --logs ml-1m
    python experiments/recommend_best.py PREPARED/ml-1m --jobs 11 --search-limit 210 --limit 360
    python experiments/recommend_best.py PREPARED/ml-1m --equal --jobs 15 --limit 470 --runs runs/equal

One seed of every candidate is trained first, side by side; no test event is looked at. A candidate that has not finished
within `--search-limit` seconds is not chosen. Then the candidate with the best validation NDCG@10 is trained with the seeds
0, 1, 2 and tested, together with the reference (the settings of docs/recommendation-results.md) and with `--finalists`, which
need no search: of those that are tested, the best in validation counts. Every run has the same number of epochs unless its
name says otherwise. One JSON line per run is appended as it ends; a run whose line says `done` is not repeated, `failed` and
`stopped` are.
`--equal` searches nothing: rows of `EQUAL`, which differ in the model alone, are tested with every seed. With `--runs` the
runs' folders stay, and the same command continues runs that `--limit` stopped.
`--tiny` makes each run a few steps: does everything work?
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from prism import __version__  # noqa: E402
from prism.lab.results import machine  # noqa: E402
from recommenders import run  # noqa: E402

COMMON = (
    "batch.sequences=256 validation.patience=0 optimizer.lr=2e-3 optimizer.weight_decay=0.1 schedule.warmup=50 "
    "model.hidden_size=128 model.dropout=0.2 data.length=200 epochs=40 validation.epochs=2"
)
BEST = "validation.patience=100"
"""Early stopping that never stops: the model is that of the best validation."""
TINY = "steps=3 validation.every=3 validation.sequences=40 data.length=12 model.hidden_size=16 batch.sequences=16"
REFERENCE = "prism-3"
WIDE, LONG = "model.hidden_size=256,model.num_heads=4", "data.length=400,batch.sequences=128"
BUDGET = f"model.num_hidden_layers=4,model.dropout=0.4,epochs=80,{LONG}"
CANDIDATES = {
    "reference": REFERENCE,
    "4 layers": "prism-3@model.num_hidden_layers=4,model.dropout=0.3",
    "6 layers": "prism-3@model.num_hidden_layers=6,model.dropout=0.35,optimizer.lr=1.5e-3",
    "4 layers, history 400": f"prism-3@model.num_hidden_layers=4,model.dropout=0.3,{LONG}",
    "4 layers, width 256": f"prism-3@model.num_hidden_layers=4,{WIDE},model.dropout=0.5,optimizer.lr=1e-3,epochs=60",
    "hybrid, 4 layers": "prism*3+softmax@model.num_hidden_layers=4,model.dropout=0.3",
    "hybrid, history 400": f"prism*3+softmax@model.num_hidden_layers=4,model.dropout=0.3,{LONG}",
    "hybrid, history 400, 80 epochs": f"prism*3+softmax@{BUDGET}",
    "Mamba-2, 4 layers": "mamba2@model.num_hidden_layers=4,model.dropout=0.3",
    "Mamba-2, 6 layers": "mamba2@model.num_hidden_layers=6,model.dropout=0.35,optimizer.lr=1.5e-3",
    "Mamba-2, history 400": f"mamba2@model.num_hidden_layers=4,model.dropout=0.3,{LONG}",
    "HSTU, 8 layers": "hstu@model.num_hidden_layers=8,model.dropout=0.3,optimizer.lr=1e-3",
    "4 layers, 80 epochs": "prism-3@model.num_hidden_layers=4,model.dropout=0.4,epochs=80",
    "4 layers, sampled": "prism-3@model.num_hidden_layers=4,model.dropout=0.3,loss.name=sampled_softmax,loss.count=1024",
}
"""By name: a model of benchmarks/recommenders.py with its settings."""
EQUAL = {
    "SASRec": f"sasrec@{BUDGET}",
    "HSTU": f"hstu@{BUDGET}",
    "Mamba-2": f"mamba2@{BUDGET}",
    "Gated DeltaNet": f"gated_delta@{BUDGET}",
    "PRISM, L = 3": f"prism-3@{BUDGET}",
    "hybrid, history 400, 80 epochs": f"prism*3+softmax@{BUDGET}",
}
"""Rows of one budget: the hybrid's settings for every model, chosen for none of the others."""
ROWS = {**CANDIDATES, **EQUAL}
FASTER = ("recompute=none",)
"""Changes time and memory, and no number."""


class Runs:
    """Runs side by side, with one line in a file for each that ends."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.settings = (*COMMON.split(), BEST, *(TINY.split() if arguments.tiny else []), *arguments.set)
        self.threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
        command = shlex.join(["python", "experiments/recommend_best.py", arguments.data.name, *sys.argv[2:]])
        self.provenance = {"machine": machine(), "prism": __version__, "command": command}

    def go(self, wanted: list[tuple[str, int]], test: bool, deadline: float) -> list[dict[str, Any]]:
        """Train (candidate, seed) pairs until the deadline; the rows of those that ended, now or in an earlier call."""
        rows = [row for row in self._done(test) if (row["candidate"], row["seed"]) in wanted]
        known = {(row["candidate"], row["seed"]) for row in rows}
        wanted = [pair for pair in wanted if pair not in known]
        context = multiprocessing.get_context("spawn")
        with context.Pool(self.arguments.jobs, maxtasksperchild=1) as pool:
            waiting = {pair: pool.apply_async(run, self._job(*pair, test)) for pair in wanted}
            while waiting and time.monotonic() < deadline:
                for pair in [pair for pair, result in waiting.items() if result.ready()]:
                    row = self._row(*pair, waiting.pop(pair))
                    self._write(row)
                    rows += [row] if row["status"] == "done" else []
                time.sleep(0.2)
            pool.terminate()  # a run in a folder that stays saves itself
        for name, seed in waiting:
            stopped = {"candidate": name, "seed": seed, "status": "stopped", "error": "the time was up"}
            if test:  # no result; in the search it is one: the candidate cannot be chosen
                print(f"{name}, seed {seed}: the time was up", flush=True)
            else:
                self._write(stopped)
        return rows

    def _done(self, test: bool) -> list[dict[str, Any]]:
        """Rows of earlier calls with these settings: searched ones, or tested ones."""
        if not self.arguments.output.exists():
            return []
        rows = [json.loads(line) for line in self.arguments.output.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in rows if row["status"] == "done" and row["settings"] == list(self.settings)]
        return [row for row in rows if bool(row["test"]) == test and row["model"] == ROWS[row["candidate"]]]

    def _job(self, name: str, seed: int, test: bool) -> tuple[Any, ...]:
        model = ROWS[name]
        if self.arguments.tiny:  # the candidates' own sizes would take minutes on a CPU
            model = ",".join(
                word
                for word in model.split(",")
                if not word.startswith(("data.", "batch.", "epochs", "model.hidden_size"))
            )
        settings, out = (*self.settings, *FASTER), None
        if self.arguments.runs is not None:
            mark = hashlib.sha256(json.dumps([model, seed, self.settings]).encode()).hexdigest()[:12]
            out = self.arguments.runs.resolve() / mark
        return (str(self.arguments.data), model, seed, settings, not test, self.threads), out

    def _row(self, name: str, seed: int, result: Any) -> dict[str, Any]:
        about = {"candidate": name, "model": ROWS[name], "seed": seed}
        try:
            found = result.get()
        except Exception as error:  # a failed run is a result, and must not stop the others
            return {**about, "status": "failed", "error": f"{type(error).__name__}: {error}"}
        kept = ("parameters", "best_step", "last_step", "train_seconds", "validation", "curve")
        test = (
            {key: found["test"][key] for key in ("HR@10", "NDCG@10", "HR@200", "NDCG@200")} if "test" in found else {}
        )
        return {**about, "status": "done", **{key: found[key] for key in kept}, "test": test}

    def _write(self, row: dict[str, Any]) -> None:
        self.arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with self.arguments.output.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "settings": list(self.settings), **self.provenance}) + "\n")
        shown = row.get("error") or f"validation {row['validation']}, test {row['test']}, {row['train_seconds']:.0f} s"
        print(f"{row['candidate']}, seed {row['seed']}: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of prepared events")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES), help="to search")
    parser.add_argument("--finalists", nargs="+", default=[], choices=list(CANDIDATES), help="candidates to be tested")
    parser.add_argument(
        "--equal",
        nargs="*",
        metavar="ROW",
        help=f"test rows of one budget, without a search: {', '.join(EQUAL)}; none given: all",
    )
    parser.add_argument("--runs", type=Path, help="folder of the runs, where those that were stopped go on")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the final runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--search-limit", type=float, default=float("inf"), help="seconds of the search")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--set", nargs="*", default=[], help="settings of every run")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "experiments" / "results" / "recommend_best.jsonl")
    arguments = parser.parse_args()
    started, runs = time.monotonic(), Runs(arguments)
    if arguments.equal is not None:
        if unknown := set(arguments.equal) - set(EQUAL):
            parser.error(f"--equal has no row {', '.join(sorted(unknown))}: choose from {', '.join(EQUAL)}")
        finalists = dict.fromkeys(arguments.equal or EQUAL)
    else:
        searched = runs.go([(name, 0) for name in arguments.candidates], False, started + arguments.search_limit)
        if not searched:
            raise SystemExit("no candidate finished: give more time with --search-limit")
        best = max(searched, key=lambda row: row["validation"]["NDCG@10"])["candidate"]
        print(f"best in validation: {best} ({CANDIDATES[best]})", flush=True)
        finalists = dict.fromkeys([best, *arguments.finalists, "reference"])
    final = runs.go([(name, seed) for seed in arguments.seeds for name in finalists], True, started + arguments.limit)
    for name in finalists:
        mine = [row for row in final if row["candidate"] == name]
        for part in ("validation", "test"):
            for metric in ("HR@10", "NDCG@10"):
                values = [row[part][metric] for row in mine]
                if values:
                    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
                    print(f"{name} {part} {metric}: {statistics.mean(values):.4f} ± {error:.4f} ({len(values)} seeds)")


if __name__ == "__main__":
    main()
