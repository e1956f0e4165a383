"""`prism serve rec`: a recommender behind HTTP, with a store of events and states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from prism.messages import say
from prism.serve.settings import ServerSettings, read_api_key

if TYPE_CHECKING:
    from socket import socket

    from prism.serve.rec.settings import RecSettings
    from prism.serve.rec.store import Store


def serve_rec(
    run: Positional[Path],
    store: str = "prism-serve.db",
    host: str = "127.0.0.1",
    port: int = 8087,
    workers: int = 1,
    api_key_file: Path | None = None,
    rebuild: bool = False,
    state_memory: int = 256,
    max_body: int = 4,
    max_length: int | None = None,
    wait: float = 10.0,
    grace: float = 20.0,
    device: str = "auto",
    log_level: str = "info",
) -> int:
    """Serve a recommender: events in, recommendations out, every user's state kept.

    Args:
        run: run of `prism train rec`, or saved recommender.
        store: SQLite file, or postgresql://user@host/name.
        host: address to listen on.
        port: 0: any free port.
        workers: number of processes on the port and the store.
        api_key_file: the key clients must send. None: $PRISM_API_KEY.
        rebuild: take over the store of another model.
        state_memory: MiB of memory for states, per worker.
        max_body: largest request, in MiB.
        max_length: events to read again, for models whose state grows.
        wait: seconds to wait for a database that is down.
        grace: seconds for running requests to finish.
        device: cpu, cuda, cuda:1 … auto: cuda if available.
        log_level: debug (all requests), info, warning, error.
    """
    from prism.serve.logs import check_level
    from prism.serve.run import announce, bind

    check_level(log_level)
    for name, value in (("workers", workers), ("state_memory", state_memory), ("max_body", max_body)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    settings = ServerSettings(host, port, read_api_key(api_key_file), max_body * 2**20, grace)
    bound = bind(settings)  # before the model is loaded: a port in use is known at once

    from prism.serve.rec.settings import RecSettings

    choices = RecSettings(store, state_memory * 2**20, max_length, rebuild, wait)
    if workers == 1:
        return _serve(0, run, device, settings, choices, bound, log_level, f"recommender {run}")

    from prism.serve.workers import supervise

    claim(run, device, choices)  # one process, so that a store that does not fit is refused in one sentence
    announce(settings, bound, f"recommender {run}, {workers} workers,")
    return supervise(_serve, (run, device, settings, choices, bound, log_level, ""), workers, grace)


def claim(run: Path, device: str, choices: RecSettings) -> None:
    """Load the model and open the store once, to report what is wrong with them."""
    from prism.recommend import Recommender
    from prism.serve.rec.service import claim_store, identity
    from prism.serve.rec.settings import open_store

    recommender = Recommender.load(run, device=device)
    store = open_store(choices.store, choices.wait, say)
    claim_store(store, identity(recommender), str(run), choices.rebuild)
    say_if_empty(store)
    store.close()


def say_if_empty(store: Store) -> None:
    """Say that users of the training data are unknown, if the store holds no events."""
    if store.totals().events == 0:
        say(
            f"the store {store.name} holds no events yet: users of the training data are unknown to it until their events "
            "are posted to /api/feedback"
        )


def _serve(
    number: int,
    run: Path,
    device: str,
    settings: ServerSettings,
    choices: RecSettings,
    bound: socket,
    log_level: str,
    name: str,
) -> int:
    """One worker."""
    from prism.recommend import Recommender
    from prism.serve.metrics import Metrics
    from prism.serve.rec.app import rec_app
    from prism.serve.rec.service import RecService
    from prism.serve.rec.settings import open_store
    from prism.serve.run import serve

    recommender = Recommender.load(run, device=device)
    store = open_store(choices.store, choices.wait, say)
    service = RecService(recommender, str(run), store, choices, Metrics("events"))
    if name:  # the only process
        say_if_empty(store)
    return serve(rec_app(service, settings), settings, bound, name, log_level)
