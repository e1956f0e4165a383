"""`prism serve rec`: a recommender behind HTTP, with a store of events and states."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from prism.messages import say


def serve_rec(
    run: Positional[Path],
    store: str = "prism-serve.db",
    host: str = "127.0.0.1",
    port: int = 8087,
    api_key_file: Path | None = None,
    rebuild: bool = False,
    state_cache: str | None = None,
    state_memory: int = 256,
    max_body: int = 4,
    wait: float = 10.0,
    grace: float = 20.0,
    device: str = "auto",
    log_level: str = "info",
) -> int:
    """Serve a recommender: events in, recommendations out, every user's state kept.

    Args:
        run: run folder of `prism train rec`, or folder of a saved recommender.
        store: file of events and states (SQLite), or postgresql://user@host/name.
        host: address to listen on; other than localhost, everyone who reaches it.
        port: 0: any free port.
        api_key_file: file with the key that clients must send. None: $PRISM_API_KEY.
        rebuild: accept a store of another model, and read its histories again.
        state_cache: redis://… that caches states. None: no cache.
        state_memory: MiB of memory for states of active users.
        max_body: largest request, in MiB.
        wait: seconds to wait for a database that is down.
        grace: seconds for running requests to finish at the end.
        device: cpu, cuda, cuda:1 … auto: cuda if available.
        log_level: debug (every request), info, warning or error.
    """
    from prism.serve.logs import check_level
    from prism.serve.run import bind, serve
    from prism.serve.settings import ServerSettings, read_api_key

    check_level(log_level)
    settings = ServerSettings(host, port, read_api_key(api_key_file), max_body * 2**20, grace)
    bound = bind(settings)  # before the model is loaded: a port in use is known at once

    from prism.recommend import Recommender
    from prism.serve.metrics import Metrics
    from prism.serve.rec.app import rec_app
    from prism.serve.rec.service import RecService
    from prism.serve.rec.settings import RecSettings, open_store

    recommender = Recommender.load(run, device=device)
    choices = RecSettings(store, state_cache, state_memory * 2**20, rebuild=rebuild, wait=wait)
    service = RecService(recommender, str(run), open_store(store, wait, say), choices, Metrics("events"))
    return serve(rec_app(service, settings), settings, bound, f"recommender {run}", log_level)
