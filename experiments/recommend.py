"""Compare recommenders on several logs with several seeds, side by side on one device; one JSON line per run.

    python experiments/recommend.py prepare DATA PREPARED                   # raw files to folders; needs polars
    python experiments/recommend.py run PREPARED --logs ml-1m --seeds 0 1 2 3 4 --jobs 12

DATA holds `ml-1m.txt`, `Beauty_5core.txt`, `beauty_bert4rec.txt` and `ml-100k.inter`, or the same with `.xz`. Every run is
`prism train rec` with the settings below (`benchmarks/recommenders.py`), and ranks the test events once, by the weights that
were best in validation. `prism-1`, PRISM with L = 1, is Gated DeltaNet whose decays start as PRISM's: next to it only the
rank differs. Lines are those of `prism compare`: a run whose line says `done` is not repeated, `failed` and `stopped` are.
`ml-100k-gaps` is the ablation on a log with side features: the time since the previous event is an input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from prism import __version__  # noqa: E402
from prism.lab.results import machine  # noqa: E402
from recommenders import run  # noqa: E402

COMMON = "batch.sequences=256 validation.patience=0 optimizer.lr=2e-3 optimizer.weight_decay=0.1 schedule.warmup=50"
BEAUTY = f"{COMMON} model.hidden_size=64 model.dropout=0.3 data.length=50 epochs=20 validation.epochs=2"
LOGS: dict[str, tuple[str, str]] = {
    "ml-1m": (
        "ml-1m.txt",
        f"{COMMON} model.hidden_size=128 model.dropout=0.2 data.length=200 epochs=40 validation.epochs=2",
    ),
    "beauty": ("Beauty_5core.txt", BEAUTY),
    "beauty_bert4rec": ("beauty_bert4rec.txt", BEAUTY),
    "ml-100k-gaps": (
        "ml-100k.inter",
        f"{COMMON} model.hidden_size=64 model.dropout=0.2 model.time_gaps=true data.length=100 epochs=60 "
        "validation.epochs=3 batch.sequences=64",
    ),
}
"""By name: the raw file, and the settings of every run on it."""
MODELS = ("sasrec", "gated_delta", "prism-1", "prism-2", "prism-3")
"""Names of benchmarks/recommenders.py: prism-2 is PRISM with L = 2."""
_started: Any = None


def raw_file(data: Path, name: str) -> Path:
    """The raw file of a log, perhaps compressed."""
    found = [path for path in (data / name, data / f"{name}.xz") if path.is_file()]
    if not found:
        raise FileNotFoundError(f"{data} has neither {name} nor {name}.xz")
    return found[0]


def prepare(data: Path, out: Path, logs: list[str]) -> None:
    """Write one folder of prepared events per log, which needs no polars to open."""
    from prism.recommend.events import EventRecipe
    from prism.recommend.events.recipe import make_dataset

    for log in logs:
        source = raw_file(data, LOGS[log][0])
        if not (out / log).exists():
            print(log, *make_dataset(EventRecipe(source=str(source)), source).save(out / log).summary(), sep="\n  ")


def one(job: tuple[int, str, str, int, tuple[str, ...], int]) -> dict[str, Any]:
    """A finished or failed run as the part of its line that it alone knows."""
    number, source, model, seed, settings, threads = job
    _started.put(number)
    try:
        row = run((source, model, seed, settings, False, threads))
    except Exception as error:  # a failed run is a result, and must not stop the others
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    names = ("NDCG@10", "HR@10", "NDCG@200", "HR@200", "AUC")
    kept = ("parameters", "best_step", "last_step", "events_per_second", "curve")
    result = {
        "scores": {name: row["test"][name] for name in names},
        "validation": row["validation"]["NDCG@10"],
        "better": "higher",
        "metric": "NDCG@10",
        "seconds": row["train_seconds"],
        **{name: row[name] for name in kept},
    }
    return {"status": "done", "result": result}


def note_starts(queue: Any) -> None:
    """In a worker: keep the queue that hears of every start."""
    global _started
    _started = queue


def key_of(about: dict[str, Any]) -> str:
    """A hash of what a run is."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]


def done(path: Path) -> set[str]:
    """Keys of the finished runs in a file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {line["key"] for line in lines if line["status"] == "done"}


def compare(arguments: argparse.Namespace) -> None:
    """Run what is not finished, `jobs` at a time, and append a line as each run ends."""
    command = shlex.join(["python", "experiments/recommend.py", "run", arguments.data.name, *sys.argv[3:]])
    provenance = {"machine": machine(), "prism": __version__, "command": command}
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    known, abouts, jobs = done(arguments.output), [], []
    for seed in arguments.seeds:
        for log in arguments.logs:
            for model in arguments.models:
                settings = (*LOGS[log][1].split(), *arguments.set)
                about = {"task": log, "rule": model, "seed": seed, "settings": list(settings)}
                if key_of(about) not in known:
                    jobs.append((len(jobs), str(arguments.data / log), model, seed, settings, threads))
                    abouts.append({"key": key_of(about), "phase": "final", **about})
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + arguments.limit
    starts = context.SimpleQueue()
    with (
        arguments.output.open("a", encoding="utf-8") as out,
        context.Pool(arguments.jobs, note_starts, (starts,)) as pool,
    ):

        def write(number: int, outcome: dict[str, Any]) -> None:
            out.write(json.dumps({**abouts[number], **outcome, **provenance}) + "\n")
            out.flush()
            result = outcome.get("result", {"scores": {}, "seconds": 0, "events_per_second": 0})
            said = f"{result['seconds']:.0f} s, {result['events_per_second']:.0f} events/s"
            words = (abouts[number][name] for name in ("task", "rule", "seed"))
            print(*words, outcome["status"], result["scores"].get("NDCG@10", ""), said, flush=True)

        waiting = {job[0]: pool.apply_async(one, (job,)) for job in jobs}
        while waiting and time.monotonic() < deadline:
            for number in [number for number, result in waiting.items() if result.ready()]:
                write(number, waiting.pop(number).get())
            time.sleep(0.2)
        pool.terminate()
        while not starts.empty():
            if (number := starts.get()) in waiting:
                write(number, {"status": "stopped", "error": f"still running after {arguments.limit:.0f} s"})
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs ended; lines in {arguments.output.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    making, running = commands.add_parser("prepare"), commands.add_parser("run")
    making.add_argument("data", type=Path)
    making.add_argument("out", type=Path)
    running.add_argument("data", type=Path, help="what `prepare` wrote")
    running.add_argument("--models", nargs="+", default=list(MODELS), help="as in benchmarks/recommenders.py")
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    running.add_argument("--jobs", type=int, default=1, help="runs at a time")
    running.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds")
    running.add_argument("--set", nargs="*", default=[], help="settings of every run, such as epochs=1")
    running.add_argument("--output", type=Path, default=ROOT / "experiments" / "results" / "recommend.jsonl")
    for command in (making, running):
        command.add_argument("--logs", nargs="+", default=list(LOGS), choices=list(LOGS))
    arguments = parser.parse_args()
    if arguments.what == "prepare":
        prepare(arguments.data, arguments.out, arguments.logs)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
