"""Kill `prism serve rec` with SIGKILL during 1,000 concurrent appends, many times, and check that nothing is lost.

    python scripts/serve_kill_test.py                                   # 20 kills, SQLite
    python scripts/serve_kill_test.py --store postgresql://user@host/db # an empty database

Every round starts the service on the same store, sends 1,000 appends at once, each on a connection, and kills it at a random
moment among them. Then every event that was acknowledged must be in the store once, none twice, none that was not sent; and
after a last start, the recommendations must be those of a fresh replay of the stored events. The tests do three kills.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.http_load import Connection
from prism.cli import main as prism
from prism.serve.rec.settings import open_store
from tests.children import finish, free_port, start_children, wait_until
from tests.serve.services import ITEMS, recommender, replayed

USERS = 50


def main(kills: int = 20, appends: int = 1000, seed: int = 0, store: str | None = None) -> int:
    """Kill the service during appends, and compare what it acknowledged with what is stored.

    Args:
        kills: Number of kills.
        appends: Requests at once.
        seed: Seed of events and moments.
        store: An empty store. None: a SQLite file.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recommender().save(folder / "model")
        url = store or str(folder / "store.db")
        sent: list[tuple[str, str, str]] = []
        acknowledged: list[tuple[str, str, str]] = []
        for number in range(kills):
            child, address = start(folder / "model", url)
            events = [
                (f"u{chance.randrange(USERS)}", f"i{chance.randint(1, ITEMS)}", f"{number}-{n}") for n in range(appends)
            ]
            sent += events
            done = asyncio.run(append_and_kill(child, address, events, chance.randrange(appends)))
            acknowledged += done
            print(f"kill {number + 1:2d}: {len(done)} of {appends} acknowledged before it", flush=True)
        child, address = start(folder / "model", url)
        faults = check(url, address, sent, acknowledged)
        child.terminate()
        assert finish([child]) == [0], "it did not stop gracefully"
    print(
        f"{kills} kills, {len(sent)} appends, {len(acknowledged)} acknowledged: {faults or 'all there once, none twice'}"
    )
    return 1 if faults else 0


def start(model: Path, store: str) -> tuple[BaseProcess, str]:
    """The service in a child, when it is ready."""
    port = free_port()
    arguments = ["serve", "rec", str(model), "--store", store, "--port", str(port), "--device", "cpu"]
    (child,) = start_children(_serve, [*arguments, "--log-level", "error"])
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: _answers(address), [child])
    return child, address


def _serve(arguments: list[str]) -> None:
    sys.exit(prism(arguments))


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/api/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


async def append_and_kill(
    child: BaseProcess, address: str, events: list[tuple[str, str, str]], after: int
) -> list[tuple[str, str, str]]:
    """Send all appends at once; kill the child when `after` of them are acknowledged. Returns the acknowledged ones.

    The kind of an event is unique, so that each can be found again.
    """
    acknowledged: list[tuple[str, str, str]] = []

    async def append(user: str, item: str, kind: str) -> None:
        connection = Connection(address)
        body = [{"FeedbackType": kind, "UserId": user, "ItemId": item}]
        try:
            answer = await connection.request("POST", "/api/feedback", body)
        except OSError:
            return  # never answered: it may be stored or not
        finally:
            connection.close()
        assert answer == {"RowAffected": 1}
        acknowledged.append((user, item, kind))
        if len(acknowledged) == after + 1:
            child.kill()

    await asyncio.gather(*(append(*event) for event in events))  # each on a connection: all are under way at once
    assert finish([child]) == [-signal.SIGKILL]
    return acknowledged


def check(url: str, address: str, sent: list[tuple[str, str, str]], acknowledged: list[tuple[str, str, str]]) -> str:
    """What is wrong with the store; "" if nothing is."""
    store, model = open_store(url, 1.0, print), recommender()
    faults = []
    stored: Counter[tuple[str, str, str]] = Counter()
    with httpx.Client(base_url=address, timeout=60) as client:
        for user, account in store.accounts([f"u{n}" for n in range(USERS)]).items():
            (log,) = store.events_after([account.uid], [0])
            stored.update((user, event.item, event.kind) for event in log)
            if [event.number for event in log] != list(range(1, account.events + 1)):
                faults.append(f"events of {user} are not numbered 1, 2, …")
            if client.get(f"/api/recommend/{user}").json() != replayed(model, [event.item for event in log]):
                faults.append(f"recommendations of {user} are not those of a fresh replay")
        figures = client.get("/api/stats").json()
    store.close()
    if lost := set(acknowledged) - stored.keys():
        faults.append(f"{len(lost)} acknowledged events are lost")
    if invented := stored.keys() - set(sent):
        faults.append(f"{len(invented)} events were never sent")
    if double := [event for event, count in stored.items() if count > 1]:
        faults.append(f"{len(double)} events are stored twice")
    if (figures["Events"], figures["Users"]) != (stored.total(), len({event[0] for event in stored})):
        faults.append("the totals are wrong")
    return "; ".join(faults)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
