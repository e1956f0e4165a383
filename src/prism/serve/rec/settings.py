"""Settings of `prism serve rec`, and the store that a URL stands for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prism.serve.rec.sqlite import SqliteStore
from prism.serve.rec.store import Store, StoreError

MOST_N = 1000
"""Most items in one answer."""
MOST_EVENTS = 10_000
"""Most events in one request, and most items of a history or a list of candidates."""
LONGEST_ID = 256
"""Most characters of an id."""


@dataclass(frozen=True)
class RecSettings:
    """What a recommender's service needs besides its address."""

    store: str = "prism-serve.db"
    """A file (SQLite), or a URL such as postgresql://user@host/name."""
    state_memory: int = 256 * 2**20
    """Bytes of memory for the states of the users who were last active."""
    max_length: int | None = None
    """For models whose state grows: events to read again. None: as many as in training. 0: all."""
    rebuild: bool = False
    """Whether a store whose states are of another model is taken over: a user's history is read again when it is needed."""
    wait: float = 10.0
    """Seconds to wait at the start for a database that is down."""


def make_store(url: str) -> Store:
    """The store of a URL; nothing is opened yet."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("postgresql", "postgres"):
        from prism.serve.rec.postgres import PostgresStore

        return PostgresStore(url)
    if scheme == "sqlite":
        url = url.removeprefix("sqlite://").removeprefix("/") if not url.startswith("sqlite:////") else url[10:]
    elif scheme:
        raise ValueError(f"store must be a file, sqlite:///FILE or postgresql://…, got a URL of the kind {scheme}://")
    if not url:
        raise ValueError("store must name a file, such as shop.db, or be a URL postgresql://user@host/name")
    return SqliteStore(Path(url))


def open_store(url: str, wait: float, say: Callable[[str], None]) -> Store:
    """The store of a URL, opened. A database that is down is tried again for `wait` seconds; then ValueError."""
    store = make_store(url)
    local = isinstance(store, SqliteStore)
    deadline, pause = time.monotonic() + wait, 0.25
    while (error := _open(store)) is not None:
        if local or time.monotonic() + pause > deadline:
            tried = "" if local else f" (tried for {wait:g} s)"
            raise ValueError(f"the store cannot be opened{tried}: {error}") from error
        say(f"waiting for the store: {error}")
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
    return store


def _open(store: Store) -> StoreError | None:
    try:
        store.open()
    except StoreError as error:
        store.close()
        return error
    return None
