"""Measure `prism serve rec` over HTTP: long histories, many users at once, a million users in the store.

    python benchmarks/serve.py                 # minutes, on 2 idle cores
    python benchmarks/serve.py --quick         # a minute: fewer requests, shorter histories, fewer users

Ratios within one run, which is what carries over to other machines. The service is a separate process with one thread of
torch; this process makes the requests. Weights are random: speed does not depend on them. One "event" is a POST of one event,
which is durable when it is answered, and a GET of the recommendation after it.

- history: p50 of one event at histories of 10, 1,000 and 10,000 events. SASRec, whose state grows, reads the history again.
- users at once: events per second of 64 users against one at a time.
- a million users: start of the service, p99 for random users and memory, against a store with a thousand users.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from http_load import Connection
from prism.lab.results import write_results
from prism.models import PrismForRecommendation, PrismRecConfig
from prism.models.config import SASREC
from prism.recommend import Recommender
from prism.recommend.events import Catalogue
from prism.serve.rec.pool import StatePool
from prism.serve.rec.seen import NONE_SEEN, add_seen, pack_seen
from prism.serve.rec.service import claim_store, identity
from prism.serve.rec.settings import open_store

MODELS: dict[str, dict[str, Any]] = {"prism": {"layers": "prism"}, "sasrec": dict(SASREC)}
LAYERS = {"num_heads": 2, "num_hidden_layers": 2}
ITEMS = 20_000
EVENTS_PER_USER = 3


def save_model(folder: Path, kind: str, width: int) -> Recommender:
    """A recommender of two layers with random weights."""
    torch.manual_seed(0)
    config = PrismRecConfig(num_items=ITEMS, **{**MODELS[kind], "hidden_size": width, **LAYERS})
    model = PrismForRecommendation(config).eval()
    model.describe_items(counts=torch.arange(ITEMS + 1))
    recommender = Recommender(model, Catalogue([f"i{n}" for n in range(1, ITEMS + 1)]))
    recommender.save(folder)
    return recommender


class Service:
    """`prism serve rec` in a process."""

    def __init__(self, model: Path, store: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "prism", "serve", "rec", str(model), "--store", str(store), "--port", "0"]
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--device", "cpu", "--log-level", "info", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if '"ready"' in line:
                break
        else:
            raise RuntimeError("".join(said))
        self.seconds = time.perf_counter() - started
        self.url = next(line for line in said if " at http" in line).split(" at ")[1].split()[0]

    @property
    def memory(self) -> int:
        """Resident bytes that are not files."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def service(model: Path, store: Path, *flags: str) -> Iterator[Service]:
    running = Service(model, store, *flags)
    try:
        yield running
    finally:
        running.stop()


async def one_event(connection: Connection, user: str, item: str) -> float:
    """Store an event and ask for the recommendation; returns the seconds."""
    started = time.perf_counter()
    await connection.request("POST", "/api/feedback", [{"FeedbackType": "click", "UserId": user, "ItemId": item}])
    await connection.request("GET", f"/api/recommend/{user}")
    return time.perf_counter() - started


def random_item(chance: random.Random) -> str:
    return f"i{chance.randint(1, ITEMS)}"


def quantile(seconds: Sequence[float], q: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def by_history(url: str, lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """p50 in ms of one event, by the number of events before; lengths take turns."""
    connection, chance = Connection(url), random.Random(0)
    for length in lengths:
        for start in range(0, length, 2000):
            events = [
                {"FeedbackType": "view", "UserId": f"h{length}", "ItemId": random_item(chance)}
                for _ in range(start, min(length, start + 2000))
            ]
            await connection.request("POST", "/api/feedback", events)
        await one_event(connection, f"h{length}", random_item(chance))
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(repeats):
        for length in lengths:
            times[length].append(await one_event(connection, f"h{length}", random_item(chance)))
    connection.close()
    return {str(length): 1000 * median(seconds) for length, seconds in times.items()}


async def events_per_second(url: str, users: int, seconds: float, seed: int) -> float:
    """Events per second of this many users at once, each of whom waits for an answer before the next event."""
    chance, count, end = random.Random(seed), 0, time.perf_counter() + seconds

    async def visit(user: str) -> None:
        nonlocal count
        connection = Connection(url)
        while time.perf_counter() < end:
            await one_event(connection, user, random_item(chance))
            count += 1
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(visit(f"c{seed}-{n}") for n in range(users)))
    return count / (time.perf_counter() - started)


def fill_store(path: Path, recommender: Recommender, name: str, users: int) -> None:
    """A store with users who have a few events and a state each, written without the service, which would take hours."""
    store = open_store(str(path), 1.0, print)
    claim_store(store, identity(recommender), name, False)
    number = store.model_number(identity(recommender), name)
    store.close()
    chance = random.Random(1)
    items = [[random_item(chance) for _ in range(EVENTS_PER_USER)] for _ in range(64)]
    states = recommender.observe(recommender.start(64), items)
    pool = StatePool(recommender.start(1), 64)
    pool.write(range(64), states)
    packed = pool.pack(range(64))
    seen = [pack_seen(add_seen(NONE_SEEN, recommender.catalogue.rows(row)), ITEMS) for row in items]
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("ATTACH DATABASE ? AS derived", (f"{path}.states",))
    for schema in ("main", "derived"):
        connection.execute(f"PRAGMA {schema}.synchronous = OFF")
    for start in range(0, users, 20_000):
        block = range(start, min(users, start + 20_000))
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO users VALUES (?, ?, ?)", ((n + 1, f"u{n}", EVENTS_PER_USER) for n in block))
        connection.executemany(
            "INSERT INTO events VALUES (?, ?, 'click', ?, ?, NULL)",
            ((n + 1, k + 1, items[n % 64][k], 1000 * k) for n in block for k in range(EVENTS_PER_USER)),
        )
        connection.executemany(
            "INSERT INTO derived.states VALUES (?, ?, ?, 0, ?, ?, 0)",
            ((n + 1, number, EVENTS_PER_USER, packed[n % 64], seen[n % 64]) for n in block),
        )
        connection.execute("COMMIT")
    connection.execute("UPDATE totals SET users = ?, events = ?", (users, EVENTS_PER_USER * users))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


async def random_users(urls: dict[int, str], requests: int) -> dict[int, list[float]]:
    """Seconds of one event of a random user, for services with so many users, in turns."""
    connections = {users: Connection(url) for users, url in urls.items()}
    chance = random.Random(2)
    times: dict[int, list[float]] = {users: [] for users in urls}
    for number in range(requests + 50):
        for users, connection in connections.items():
            seconds = await one_event(connection, f"u{chance.randrange(users)}", random_item(chance))
            if number >= 50:  # the first ones open connections and fill caches
                times[users].append(seconds)
    return times


def measure_histories(folder: Path, quick: bool) -> dict[str, Any]:
    lengths = (10, 100, 1000) if quick else (10, 1000, 10_000)
    found: dict[str, Any] = {}
    for kind in MODELS:
        save_model(folder / kind, kind, 64)
        repeats = (40 if quick else 300) if kind == "prism" else (10 if quick else 30)
        with service(folder / kind, folder / f"{kind}.db", "--max-length", "0") as running:
            p50 = asyncio.run(by_history(running.url, lengths, repeats))
        found[kind] = {"p50_ms": p50, "ratio": max(p50.values()) / min(p50.values())}
        print(f"{kind}: p50 {', '.join(f'{n} events {ms:.2f} ms' for n, ms in p50.items())}", flush=True)
    return found


def measure_users_at_once(folder: Path, quick: bool) -> dict[str, Any]:
    rounds, seconds = (1, 2.0) if quick else (5, 5.0)
    alone, together = [], []
    with service(folder / "prism", folder / "at-once.db") as running:
        asyncio.run(events_per_second(running.url, 64, 1.0, 0))
        for number in range(rounds):
            alone.append(asyncio.run(events_per_second(running.url, 1, seconds, 2 * number + 1)))
            together.append(asyncio.run(events_per_second(running.url, 64, seconds, 2 * number + 2)))
    ratio = median(together) / median(alone)
    print(f"events/s: one user {median(alone):.0f}, 64 users {median(together):.0f}, ratio {ratio:.1f}", flush=True)
    return {"one": alone, "64": together, "ratio": ratio}


def measure_many_users(folder: Path, quick: bool) -> dict[str, Any]:
    few, many = 1000, 20_000 if quick else 1_000_000
    recommender = save_model(folder / "small", "prism", 16)
    services: dict[int, Service] = {}
    found: dict[str, Any] = {"state_bytes": recommender.start(1).nbytes}
    try:
        for users in (few, many):
            store = folder / f"users-{users}.db"
            fill_store(store, recommender, str(folder / "small"), users)
            services[users] = Service(folder / "small", store)
            found[str(users)] = {
                "start_s": services[users].seconds,
                "bytes_on_disk": sum(path.stat().st_size for path in folder.glob(f"{store.name}*")),
                "memory_at_start": services[users].memory,
            }
        times = asyncio.run(random_users({users: one.url for users, one in services.items()}, 100 if quick else 3000))
        for users, seconds in times.items():
            found[str(users)].update(
                p50_ms=1000 * quantile(seconds, 0.5),
                p99_ms=1000 * quantile(seconds, 0.99),
                memory=services[users].memory,
            )
    finally:
        for one in services.values():
            one.stop()
    found["p99_ratio"] = found[str(many)]["p99_ms"] / found[str(few)]["p99_ms"]
    extra = found[str(many)]["memory_at_start"] - found[str(few)]["memory_at_start"]
    found["idle_user_memory_bytes"] = extra / (many - few)
    for users in (few, many):
        facts = found[str(users)]
        print(
            f"{users:,} users: start {facts['start_s']:.1f} s, p50 {facts['p50_ms']:.2f} ms, p99 {facts['p99_ms']:.2f} ms, "
            f"{facts['memory'] / 2**20:.0f} MiB of memory, {facts['bytes_on_disk'] / 2**20:.0f} MiB on disk",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests, shorter histories, fewer users")
    parser.add_argument("--only", choices=("histories", "at-once", "many-users"), help="one of the three measurements")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/serve.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"quick": arguments.quick}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.only in (None, "histories"):
            results["history"] = measure_histories(folder, arguments.quick)
        if arguments.only in (None, "at-once"):
            save_model(folder / "prism", "prism", 64)
            results["users_at_once"] = measure_users_at_once(folder, arguments.quick)
        if arguments.only in (None, "many-users"):
            results["many_users"] = measure_many_users(folder, arguments.quick)
    print(write_results(arguments.output, results, command=shlex.join(["python", *sys.argv])))


if __name__ == "__main__":
    main()
