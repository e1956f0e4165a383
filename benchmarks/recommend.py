"""Time training and evaluation of recommenders on this machine's CPU, and of RecTools' with equal settings.

    python -m venv rectools && rectools/bin/pip install "rectools[torch]" "numpy<2"
    python benchmarks/recommend.py ml-100k.inter --peer rectools/bin/python
    python benchmarks/recommend.py ml-100k.inter --peer rectools/bin/python --models sasrec ease als --peers sasrec ease als
    python benchmarks/recommend.py ml-100k.inter                                # ours alone

The time covers everything: reading the events, 20 epochs, ranking all items for every user's last event. Each run is a
separate process, whose imports are not timed. Models take turns, so that a disturbance of the machine affects all of them. The
fastest repeat is reported; all are in the file. Seen items are left out of the ranking, and at most `--length` events of a
history are read by sequence models. No model validates while training. With `--part validation` the validation events are
ranked: then EASE and ALS know the same events here and there. With `--plain` our models are trained as RecTools trains its
own: a constant learning rate without warmup, no weight decay, no clipping. With `--same` RecTools' SASRec also has the layers,
initial weights and catalogue of ours (rectools_same.py), and ours products in float32: the definitions are then the same. That
is checked: both train from our initial weights for a few steps without dropout, on all users at once, so that nothing is
random; then RecTools gets our trained weights. After both, the scores of all items for all users are compared.
`--device cuda --jobs 6` compares quality only: runs then share the GPU, and their times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "epochs": 20,
    "width": 64,
    "layers": 2,
    "heads": 2,
    "hidden": 192,
    "length": 50,
    "batch": 128,
    "dropout": 0.2,
    "lr": 1e-3,
    "seed": 0,
    "ease_regularization": 500.0,
    "als_factors": 64,
    "als_regularization": 0.1,
    "als_alpha": 10.0,
    "als_iterations": 15,
}
PLAIN: dict[str, dict[str, Any]] = {
    "optimizer": {"weight_decay": 0.0, "clip": None},
    "schedule": {"name": "constant", "warmup": 0},
}
BASELINES = ("ease", "als")
MODELS = ("sasrec", "prism", "gated_delta")


def passed(started: float, read: float, trained: float, ranked: float) -> dict[str, float]:
    """Seconds of each part of a run, from the clock at its borders."""
    return {"read": read - started, "train": trained - read, "evaluate": ranked - trained, "all": ranked - started}


def run_baseline(path: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Fit and evaluate one of the baselines, end to end."""
    import polars  # noqa: F401
    import torch

    from prism.recommend.baselines import fit_baseline
    from prism.recommend.evaluate import evaluate_split
    from prism.recommend.events import EventRecipe, leave_one_out, prepare_dataset

    torch.set_num_threads(settings["threads"])
    options = [
        f"{key.removeprefix(f'{name}_')}={value}" for key, value in settings.items() if key.startswith(f"{name}_")
    ]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        dataset = prepare_dataset(EventRecipe(source=path), Path(folder))
        read = time.perf_counter()
        split = leave_one_out(dataset.histories)
        fitted = fit_baseline(f"{name}({','.join(options)})", split.train, dataset.num_items, settings["seed"])
        trained = time.perf_counter()
        found = evaluate_split(fitted, split, settings["part"], max_length=settings["length"])
        ranked = time.perf_counter()
    return {
        "seconds": passed(started, read, trained, ranked),
        "seconds_per_epoch": trained - read,
        "HR@10": found["metrics"]["HR@10"],
        "NDCG@10": found["metrics"]["NDCG@10"],
        "standard_error": found["standard_errors"]["NDCG@10"],
        "users": found["targets"],
        "parameters": None,
    }


def run_ours(path: str, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate one of our models, end to end."""
    import torch

    if settings["prepared"] is None:
        import polars  # noqa: F401  (otherwise the import would be timed with reading the events)
    from prism.models import PrismForRecommendation
    from prism.overrides import override
    from prism.recommend.evaluate import evaluate_split
    from prism.recommend.settings import PRESETS, preset
    from prism.recommend.task import RecTask, prepare_dataset, train_rec

    torch.set_num_threads(settings["threads"])
    plain = settings["plain"] or settings["same"]
    with tempfile.TemporaryDirectory() as folder:
        chosen = override(
            preset(model if model in PRESETS else None),
            {
                "out": f"{folder}/run",
                "device": settings["device"],
                "epochs": float(settings["epochs"]),
                "seed": settings["seed"],
                "model": {
                    "hidden_size": settings["width"],
                    "num_hidden_layers": settings["layers"],
                    "num_heads": settings["heads"],
                    "dropout": settings["dropout"],
                    **({} if model in PRESETS else {"layers": model}),
                    **({"intermediate_size": settings["hidden"]} if settings["same"] else {}),
                },
                "data": {
                    "source": settings["prepared"] or path,
                    "cache": f"{folder}/cache",
                    "length": settings["length"],
                    "order": "last",
                },
                "batch": {"sequences": settings["batch"]},
                "optimizer": {"lr": settings["lr"], **(PLAIN["optimizer"] if plain else {})},
                "schedule": PLAIN["schedule"] if plain else {},
                "precision": "fp32" if settings["same"] else "auto",
                "validation": {"epochs": 0.0, "sequences": 1, "patience": 0},
                "checkpoint": {"every": 0},
            },
            "benchmark",
        )
        started = time.perf_counter()
        dataset = prepare_dataset(chosen.data.recipe(), chosen.data.cache)
        if settings["save"] is not None:
            chosen = override(chosen, {"batch": {"sequences": len(dataset.histories)}}, "benchmark")
        read = time.perf_counter()
        outcome = train_rec(chosen, dataset, report=lambda step, loss: None)
        trained = time.perf_counter()
        assert outcome.model is not None
        recommender = PrismForRecommendation.from_pretrained(outcome.model).to(settings["device"]).eval()
        split = chosen.data.split_of(dataset.histories)
        found = evaluate_split(recommender, split, settings["part"], max_length=settings["length"])
        ranked = time.perf_counter()
    if settings["save"] is not None:
        save_scored(Path(settings["save"]), recommender, RecTask(chosen, dataset), settings["part"])
    return {
        "seconds": passed(started, read, trained, ranked),
        "seconds_per_epoch": (trained - read) / settings["epochs"],
        "HR@10": found["metrics"]["HR@10"],
        "NDCG@10": found["metrics"]["NDCG@10"],
        "standard_error": found["standard_errors"]["NDCG@10"],
        "users": found["targets"],
        "parameters": sum(p.numel() for p in recommender.parameters()),
    }


def save_scored(path: Path, model: Any, task: Any, part: str) -> None:
    """Write a model's weights, first and last, the users and items by their ids, and all scores before a part's targets."""
    import numpy as np
    import torch

    from prism.recommend.scorer import ModelScorer

    start = task.build()
    task.initialize(start)
    weights = {
        f"{when}.{name}": value.detach().cpu().numpy()
        for when, which in (("first", start.recommender), ("last", model))
        for name, value in which.named_parameters()
    }
    targets, dataset = getattr(task.split, part), task.dataset
    scorer = ModelScorer(model.cpu().double())
    with torch.no_grad():
        parts = [targets.take(slice(i, i + 256)) for i in range(0, len(targets), 256)]
        scores = torch.cat([scorer.scores(some, dataset.histories, task.given.data.length) for some in parts])
    users = [str(dataset.users.ids[user]) for user in targets.users]
    items = [str(item) for item in dataset.catalogue.ids]
    np.savez(path, users=users, items=items, scores=scores.numpy(), **weights)


def same_scores(events: str, peer: Path, script: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train both alike, then give RecTools our weights: how far scores are apart, and the metrics of both."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/scored.npz"
        once = {**settings, "epochs": 10, "dropout": 0.0, "save": path}
        ours = start([sys.executable, __file__, events, "--one", "sasrec", *as_flags(once)])
        theirs = start([str(peer), script, events, json.dumps({**once, "model": "sasrec", "weights": path})])
    figures = {key: {"ours": ours[key], "rectools": theirs[key]} for key in ("HR@10", "NDCG@10", "parameters")}
    return {key: theirs[key] for key in ("same_weights", "trained_alike", "largest_score", "users")} | figures


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as words of the command line; those that are off or None are left out."""
    flags: list[str] = []
    for name, value in settings.items():
        if value is not None and value is not False:
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


def start(command: list[str]) -> dict[str, Any]:
    """Run a process and parse the JSON in its last line."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command[:3])} … failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "events", help="a RecBole .inter file with user_id, item_id and timestamp, such as MovieLens-100K"
    )
    parser.add_argument("--peer", type=Path, help="a Python that has rectools[torch]")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="presets, rules, ease or als")
    parser.add_argument("--peers", nargs="+", default=["sasrec"], help="RecTools' models: sasrec, ease, als")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", action="store_true", help="each repeat has the next seed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--epochs", type=int, default=SETTINGS["epochs"], help="passes over the events")
    parser.add_argument("--batch", type=int, default=SETTINGS["batch"], help="users of a step")
    for name, value in SETTINGS.items():
        if name not in ("epochs", "batch"):
            about = "width of the feed-forward layers with --same" if name == "hidden" else None
            parser.add_argument(f"--{name}", type=type(value), default=value, help=about)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of sequence models, ours and theirs")
    parser.add_argument(
        "--prepared", help="the same events prepared by experiments/recommend.py, where there is no polars"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--plain", action="store_true", help="train our models without schedule, decay and clipping")
    parser.add_argument(
        "--same", action="store_true", help="RecTools' SASRec as ours is defined; ours --plain, in float32"
    )
    parser.add_argument("--part", choices=("test", "validation"), default="test", help="events to rank")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "recommend.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shared = ("threads", "part", "plain", "same", "device", "prepared", "save")
    settings = {name: getattr(arguments, name) for name in (*SETTINGS, *shared)}
    if arguments.one:
        run = run_baseline if arguments.one in BASELINES else run_ours
        print(json.dumps(run(arguments.events, arguments.one, settings)))
        return

    from prism.lab.results import write_results

    script = str(Path(__file__).with_name("rectools_sasrec.py"))
    peers = [] if arguments.peer is None else arguments.peers
    runs: dict[str, list[dict[str, Any]]] = {
        name: [] for name in [*arguments.models, *(f"rectools-{n}" for n in peers)]
    }
    waiting = []
    apart = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        if arguments.same and peers:
            checked = pool.submit(same_scores, arguments.events, arguments.peer, script, dict(settings))
        for repeat in range(arguments.repeats):
            settings["seed"] = arguments.seed + (repeat if arguments.seeds else 0)
            flags = as_flags(settings)
            for name in runs:
                peer = name.removeprefix("rectools-") if name.startswith("rectools-") else None
                ours = [sys.executable, __file__, arguments.events, "--one", name, *flags]
                theirs = [
                    str(arguments.peer),
                    script,
                    arguments.events,
                    json.dumps({**settings, "model": peer}),
                ]
                waiting.append((name, settings["seed"], pool.submit(start, ours if peer is None else theirs)))
        for name, seed, result in waiting:
            row = {**result.result(), "seed": seed}
            runs[name].append(row)
            print(
                f"{name:16} {row['seconds']['all']:7.1f} s, {row['seconds_per_epoch']:.2f} s an epoch, "
                f"HR@10 {row['HR@10']:.4f}, NDCG@10 {row['NDCG@10']:.4f}",
                flush=True,
            )
        if arguments.same and peers:
            apart = {"same_scores": checked.result()}
            print(apart["same_scores"])
    fastest = {name: min(rows, key=lambda row: row["seconds"]["all"]) for name, rows in runs.items()}
    command = shlex.join(["python", "benchmarks/recommend.py", *sys.argv[1:]])
    settings["seed"] = arguments.seed
    results = {"settings": settings, "fastest": fastest, "runs": runs, **apart}
    print("written to", write_results(arguments.output, results, command=command))


if __name__ == "__main__":
    main()
