"""The store in PostgreSQL: the same tables; appends of several processes take turns by an advisory lock."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from prism.serve.rec.store import FORMAT, Logged, Run, Store, StoreError, tables

APPEND_LOCK = 0x5052_4953_4D00
"""Key of the advisory lock that appends take: they commit one after another, so that numbers have no gaps."""

IDLE = 1.0
"""Seconds after which a connection is tried before it is used."""


class PostgresRun(Run):
    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def __call__(self, statement: str, *arguments: Any) -> list[Any]:
        cursor = self.connection.execute(statement.replace("?", "%s"), arguments)
        return cursor.fetchall() if cursor.description else []

    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            with self.connection.cursor() as cursor:
                cursor.executemany(statement.replace("?", "%s"), rows)


class PostgresStore(Store):
    """Events and states in the database of a URL such as `postgresql://user@host/name`."""

    def __init__(self, url: str, connect_seconds: int = 3) -> None:
        self.url, self.connect_seconds = url, connect_seconds
        parts = urlsplit(url)
        hidden = parts.netloc.rpartition("@")
        user = hidden[0].partition(":")[0]
        self.name = urlunsplit((parts.scheme, f"{user}@{hidden[2]}" if user else hidden[2], parts.path, "", ""))
        self._local = threading.local()
        self._all: list[psycopg.Connection[Any]] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        with self.transaction() as run:
            run("SELECT pg_advisory_xact_lock(?)", APPEND_LOCK)  # several processes may start at once
            serial = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
            for statement in tables("BIGINT", "DOUBLE PRECISION", "BYTEA", 'TEXT COLLATE "C"', serial):
                run(statement)
            run("ALTER TABLE states ALTER COLUMN state SET STORAGE EXTERNAL")  # floats do not compress
            run("INSERT INTO facts VALUES ('format', ?) ON CONFLICT DO NOTHING", FORMAT)
            found = run("SELECT value FROM facts WHERE name = 'format'")[0][0]
        if found != FORMAT:
            raise StoreError(f"{self.name} is {found!r}, not a store of the kind {FORMAT!r}: give another --store")

    def close(self) -> None:
        with self._lock:
            for connection in self._all:
                with contextlib.suppress(psycopg.Error):
                    connection.close()
            self._all.clear()
        self._local = threading.local()

    def _connection(self) -> psycopg.Connection[Any]:
        found: psycopg.Connection[Any] | None = getattr(self._local, "connection", None)
        now = time.monotonic()
        if found is not None and not found.closed and now - self._local.used > IDLE:
            try:  # the database may have been restarted since
                found.execute("SELECT 1")
            except psycopg.Error:
                found.close()
        if found is None or found.closed or found.broken:
            found = psycopg.connect(self.url, autocommit=True, connect_timeout=self.connect_seconds)
            self._local.connection = found
            with self._lock:
                self._all = [one for one in self._all if not one.closed] + [found]
        self._local.used = now
        return found

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[Run]:
        try:
            connection = self._connection()
            with connection.transaction():
                run = PostgresRun(connection)
                if write:
                    run("SELECT pg_advisory_xact_lock(?)", APPEND_LOCK)
                yield run
        except psycopg.Error as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StoreError(f"the store {self.name} failed: {why}") from error

    def among(self, values: Sequence[Any]) -> tuple[str, Any]:
        return "= ANY(?)", list(values)

    def existing(self, run: Run, keys: Sequence[tuple[int, str, str, int]]) -> set[tuple[int, str, str, int]]:
        if not keys:
            return set()
        columns = [list(column) for column in zip(*keys, strict=True)]
        rows = run(
            "SELECT uid, item, kind, time FROM events JOIN "
            "unnest(?::bigint[], ?::text[], ?::text[], ?::bigint[]) AS asked (uid, item, kind, time) "
            "USING (uid, item, kind, time)",
            *columns,
        )
        return set(rows)

    def events_after(self, uids: Sequence[int], numbers: Sequence[int]) -> list[list[Logged]]:
        found: dict[int, list[Logged]] = {uid: [] for uid in uids}
        with self.transaction() as run:
            rows = run(
                "SELECT e.uid, e.number, e.kind, e.item, e.time, e.value FROM events AS e JOIN "
                "unnest(?::bigint[], ?::bigint[]) AS asked (uid, after) ON e.uid = asked.uid AND e.number > asked.after "
                "ORDER BY e.uid, e.number",
                list(uids),
                list(numbers),
            )
        for uid, *row in rows:
            found[uid].append(Logged(*row))
        return [found[uid] for uid in uids]
