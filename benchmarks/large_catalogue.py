"""Time recommending and ranking with a catalogue of a million items on this machine's CPU, and the memory it takes.

    python benchmarks/large_catalogue.py                                    # 1 M items, 10,000 users: minutes
    python benchmarks/large_catalogue.py --items 100_000 --users 1_000      # a quick look

Two parts, each in a separate process, so that peak memory is measured for each: `recommend` finds the top 10 of every user with
seen items left out; `evaluate` ranks a held-out event of every user among all items, with all metrics and lists. Weights are
random: time does not depend on them. Reading the histories is timed apart from ranking the items.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("recommend", "evaluate")


def run(part: str, items: int, users: int, events: int, width: int, threads: int) -> dict[str, Any]:
    """Seconds and peak memory of one part."""
    import numpy as np
    import torch

    from prism.models import PrismForRecommendation, PrismRecConfig
    from prism.recommend import Recommender
    from prism.recommend.evaluate import evaluate_split
    from prism.recommend.events import Catalogue, Histories, leave_one_out
    from prism.recommend.filters import Excluded
    from prism.recommend.top_items import best_items

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    config = PrismRecConfig(items, hidden_size=width, num_hidden_layers=2, layers="prism", max_length=events)
    model = PrismForRecommendation(config).eval()
    offsets = np.arange(users + 1) * events
    histories = Histories(offsets, random.integers(1, items + 1, users * events))
    model.describe_items(histories.counts(items))
    recommender = Recommender(model, Catalogue(range(items)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    seconds: dict[str, float] = {}
    with torch.no_grad():
        if part == "recommend":
            hidden = recommender.encode(histories)
            seconds["read"] = time.perf_counter() - started
            seen = Excluded(users, np.repeat(np.arange(users), events), histories.items)
            best_items(model, hidden, torch.full((users,), events), seen, 10)
        else:
            evaluate_split(model, leave_one_out(histories), max_length=events)
    seconds["all"] = time.perf_counter() - started
    seconds["cpu"] = time.process_time() - cpu  # of all threads: on idle cores the time is this divided by their number
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "users": users, "items": items, "peak_MiB": peak / 1024, "before_MiB": before / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=50, help="events of a user")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "large_catalogue.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("items", "users", "events", "width", "threads")}
    if arguments.one:
        print(json.dumps(run(arguments.one, **sizes)))
        return

    from prism.lab.results import write_results

    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    results: dict[str, Any] = {"settings": sizes}
    for part in arguments.parts:
        done = subprocess.run([sys.executable, __file__, "--one", part, *flags], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{part} failed: {done.stderr.strip().splitlines()[-1]}")
        results[part] = json.loads(done.stdout.strip().splitlines()[-1])
        print(part, json.dumps(results[part]), flush=True)
    command = shlex.join(["python", "benchmarks/large_catalogue.py", *sys.argv[1:]])
    print("written to", write_results(arguments.output, results, command=command))


if __name__ == "__main__":
    main()
