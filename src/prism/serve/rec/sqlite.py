"""The store in SQLite: one file for the events, which are synced at every commit, and one for the states, which are not.

States are derived, so that losing their last seconds in a power cut costs a few steps of reading. In a separate file they
also do not make event commits wait.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prism.files import check_target
from prism.serve.rec.store import FORMAT, Run, Store, StoreError, tables

BUSY = 20_000
"""Milliseconds to wait for another process that is writing."""


class SqliteRun(Run):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __call__(self, statement: str, *arguments: Any) -> list[Any]:
        return self.connection.execute(statement, arguments).fetchall()

    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        self.connection.executemany(statement, rows)


class SqliteStore(Store):
    """Events in `path`, states in `path` with `.states` appended; both in WAL mode."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        try:
            check_target(self.path, folder=False, name="store")
        except ValueError as error:
            raise StoreError(str(error)) from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            connection = self._connection()
            for schema in ("main", "derived"):
                connection.execute(f"PRAGMA {schema}.journal_mode = WAL").fetchall()
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.path} is not a store of `prism serve rec`: {error}") from error
        with self.transaction() as run:
            run("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            found = run("SELECT value FROM facts WHERE name = 'format'")
            others = run("SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT IN ('facts')")
            if (found and found[0][0] != FORMAT) or (not found and others):
                what = found[0][0] if found else f"a database with a table {others[0][0]}"
                raise StoreError(f"{self.path} is {what!r}, not a store of the kind {FORMAT!r}: give another --store")
            serial = "INTEGER PRIMARY KEY AUTOINCREMENT"
            for statement in tables("INTEGER", "REAL", "BLOB", "TEXT", serial):
                if "EXISTS states" in statement:
                    statement = statement.replace("EXISTS states", "EXISTS derived.states")
                if "EXISTS events (" in statement:  # rows in the order of the key: a history is read in one piece
                    statement += " WITHOUT ROWID"
                run(statement)
            run("INSERT OR IGNORE INTO facts VALUES ('format', ?)", FORMAT)

    def close(self) -> None:
        with self._lock:
            for connection in self._all:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
            self._all.clear()
        self._local = threading.local()

    def _connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY / 1000)
            found.execute("ATTACH DATABASE ? AS derived", (f"{self.path}.states",))
            found.execute("PRAGMA main.synchronous = FULL")
            found.execute("PRAGMA derived.synchronous = NORMAL")
            found.execute("PRAGMA temp_store = MEMORY")
            self._local.connection = found
            with self._lock:
                self._all.append(found)
        return found

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[Run]:
        try:
            connection = self._connection()
            connection.execute("BEGIN")
            try:
                if write:  # takes the lock of the events alone; BEGIN IMMEDIATE would wait for the states' file as well
                    connection.execute("UPDATE totals SET users = users")
                yield SqliteRun(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreError(f"the store {self.name} failed: {error}") from error

    def among(self, values: Sequence[Any]) -> tuple[str, Any]:
        return "IN (SELECT value FROM json_each(?))", json.dumps(values)

    def existing(self, run: Run, keys: Sequence[tuple[int, str, str, int]]) -> set[tuple[int, str, str, int]]:
        statement = "SELECT 1 FROM events WHERE uid = ? AND item = ? AND kind = ? AND time = ?"
        return {key for key in keys if run(statement, *key)}
