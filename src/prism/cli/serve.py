"""`prism serve rec`: a recommender behind HTTP, with a store of events and states."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from prism.messages import say
from prism.serve.settings import ServerSettings, read_api_key

if TYPE_CHECKING:
    from fastapi import FastAPI

    from prism.serve.rec.settings import RecSettings


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
    from prism.serve.run import bind, serve, supervise

    check_level(log_level)
    for name, value in (("workers", workers), ("state_memory", state_memory), ("max_body", max_body)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    settings = ServerSettings(host, port, read_api_key(api_key_file), max_body * 2**20, grace)
    bound = bind(settings)  # before the model is loaded: a port in use is known at once

    from prism.serve.rec.app import rec_app
    from prism.serve.rec.service import open_service
    from prism.serve.rec.settings import RecSettings

    choices = RecSettings(store, state_memory * 2**20, max_length, rebuild, wait)
    service = open_service(
        run, device, choices
    )  # with several workers too: what does not fit is refused in one sentence
    if service.store.totals().events == 0:
        say(
            f"the store {service.store.name} holds no events yet: users of the training data are unknown to it until their "
            "events are posted to /api/feedback"
        )
    if workers == 1:
        return serve(rec_app(service, settings), settings, bound, f"recommender {run}", log_level)
    service.store.close()
    del service
    make_app = partial(load_app, run, device, choices, settings)
    return supervise(make_app, settings, bound, f"recommender {run}", workers, log_level)


def load_app(run: Path, device: str, choices: RecSettings, settings: ServerSettings) -> FastAPI:
    """The application of a run: what every worker makes for itself."""
    from prism.serve.rec.app import rec_app
    from prism.serve.rec.service import open_service

    return rec_app(open_service(run, device, choices), settings)
