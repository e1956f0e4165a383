"""Updating a recommender against training it again: test NDCG@10 and time, ratios in one process.

    OMP_NUM_THREADS=1 python benchmarks/update.py ml-100k.inter --seeds 0 1 2

The log is cut in the middle of its time. A model is trained on the first half, then updated with the second half
(`Recommender.update`); another is trained on the whole log with the same settings. Both are tested on the last event of every
user of the whole log, all items ranked. Times are of the update and of the training on the whole log, in seconds of the clock
and of the processor; the training on the first half was paid for earlier and is listed apart. `--validation-only` compares
settings of the update without a look at the test events.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prism.lab.results import machine, write_results
from prism.overrides import read_toml_value
from prism.recommend.evaluate import evaluate_split
from prism.recommend.recommender import Recommender

METRIC = "NDCG@10"


def nested(words: list[str]) -> dict[str, Any]:
    """Settings from `section.name=value` words."""
    chosen: dict[str, Any] = {}
    for word in words:
        place, _, value = word.partition("=")
        section, _, key = place.rpartition(".")
        (chosen.setdefault(section, {}) if section else chosen)[key] = read_toml_value(value)
    return chosen


def timed(run: Callable[[], Recommender]) -> tuple[Recommender, dict[str, float]]:
    """What a call returns, and how long it took by the clock and on the processor."""
    started, computing = time.perf_counter(), time.process_time()
    result = run()
    return result, {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - computing}


def quality(recommender: Recommender, part: Any) -> float:
    """NDCG@10 on one part of the split of the recommender's own log."""
    assert recommender._training is not None and recommender.histories is not None
    split = recommender._training.data.split_of(recommender.histories)
    found = evaluate_split(recommender.model, split, part, max_length=recommender.model.config.max_length)
    return float(found["metrics"][METRIC])


def one_seed(events: Any, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on the first half, update with the second, train on the whole."""
    settings = {**nested(arguments.set), "seed": seed}
    parts = ("validation",) if arguments.validation_only else ("validation", "test")
    half = len(events) // 2
    row: dict[str, Any] = {"seed": seed}
    with tempfile.TemporaryDirectory() as name:
        folder, preset = Path(name), arguments.preset
        first, row["first half"] = timed(lambda: Recommender.fit(events[:half], folder / "first", preset, **settings))
        changes = nested(arguments.update)
        updated, row["update"] = timed(lambda: first.update(events[half:], folder / "update", **changes))
        models = {"update": updated}
        if not arguments.no_whole:
            models["whole"], row["whole"] = timed(lambda: Recommender.fit(events, folder / "whole", preset, **settings))
        for model_name, model in models.items():
            row[model_name] |= {part: quality(model, part) for part in parts}
    if "whole" in row:
        row["ratios"] = {key: row["update"][key] / row["whole"][key] for key in row["whole"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=Path, help="events with times, in any format that `prism train rec` reads")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--preset", default="prism")
    common = "epochs=20 validation.patience=100 validation.epochs=2 device=cpu report=false"
    parser.add_argument("--set", nargs="*", default=common.split(), help="settings of every training")
    parser.add_argument("--update", nargs="*", default=[], help="settings of the update, such as replay=0.5")
    parser.add_argument("--validation-only", action="store_true")
    parser.add_argument("--no-whole", action="store_true", help="only the update")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "update.json")
    arguments = parser.parse_args()
    from prism.recommend.events.event_table import read_events

    table = read_events(arguments.events).frame
    events = table.sort("time", maintain_order=True)
    rows = []
    for seed in arguments.seeds:
        rows.append(one_seed(events, seed, arguments))
        print(rows[-1], flush=True)
        command = shlex.join(["python", "benchmarks/update.py", arguments.events.name, *sys.argv[2:]])
        write_results(arguments.output, {"rows": rows, "machine": machine()}, command=command)
    for key in rows[0].get("ratios", {}):
        values = [row["ratios"][key] for row in rows]
        print(f"{key}: update / whole log {statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
