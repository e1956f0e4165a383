"""Table of `benchmarks/serve.py`, from the results of one run in experiments/results/serve.json."""

from __future__ import annotations

import json
from pathlib import Path

from wording import joined, paragraph, table

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "serve.json"


def measured() -> str:
    """Latency by history, throughput of users at once, and stores of many users."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    results, machine = found["results"], found["machine"]
    rows = []
    for model, label in (("prism", "PRISM"), ("sasrec", "SASRec (reads again)")):
        times = results["history"][model]["p50_ms"]
        lengths = " / ".join(f"{int(length):,}" for length in times)
        figure = " / ".join(f"{value:.1f}" for value in times.values())
        rows.append([f"p50 after {lengths} events, {label}", f"{figure} ms"])
    at_once = results["users_at_once"]
    rows.append(["64 users at once, events/s over one at a time", f"{at_once['ratio']:.1f}×"])
    many = results["many_users"]
    for users in (name for name in many if name.isdecimal()):
        one = many[users]
        figure = f"{one['start_s']:.1f} s, {one['p50_ms']:.1f} ms, {one['p99_ms']:.1f} ms"
        rows.append([f"{int(users):,} users: start, p50, p99", figure])
    where = f"{machine['cores']} cores of an {machine['cpu']}, torch {machine['torch'].partition('+')[0]}"
    intro = paragraph(f"`{found['command']}`, {where}: one event and its recommendation through HTTP, one run.")
    return joined(intro, table(["work", "measured"], rows))
