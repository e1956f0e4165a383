"""The store of a recommender: an event log, which is the truth, and states, which are derived from it.

Design choices
- A user's events are numbered 1, 2, … in the order in which they were stored. A state carries the number of the last event
  that it has read: whatever process wrote it, what is missing is read from the log.
- A user who is deleted and comes back has another uid, so that no process can mistake an old state for the new user's.
- One transaction stores the events of all requests that wait. It returns after they are durable.
- SQL is written once, with `?` for arguments; values never become part of a statement.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

KEYS_LIVE = 7 * 86400
"""Seconds for which an idempotency key is remembered."""
FORMAT = "prism serve rec 1"


class StoreError(Exception):
    """The store cannot be used now; what was asked for has not been done."""


class KeyReused(Exception):
    """An idempotency key came again with other events."""


class Event(NamedTuple):
    """One event of a user."""

    kind: str
    user: str
    item: str
    time: int | None
    """Microseconds since 1970; None: when it is stored."""
    value: float | None = None


class Logged(NamedTuple):
    """One event in the log."""

    number: int
    kind: str
    item: str
    time: int
    value: float | None


class Submission(NamedTuple):
    """The events of one request."""

    events: Sequence[Event]
    key: str | None = None
    """Idempotency key: the second request with the same key stores nothing."""
    digest: str = ""
    """Hash of the request with the key."""
    overwrite: bool = False
    """Whether the value of an event that is already there is replaced."""


class Account(NamedTuple):
    """A user in the store."""

    uid: int
    events: int


class StateRow(NamedTuple):
    """A state in the store."""

    uid: int
    number: int
    """Of the last event that the state has read."""
    updated: float
    """When, in seconds since 1970."""
    state: bytes
    seen: bytes
    items: int = 0
    """Number of the last description of an item that the model had when it read the events; see `described_after`."""


class Totals(NamedTuple):
    users: int
    events: int
    unknown: int
    """Events whose item the model did not know when they came."""


class Store(ABC):
    """What both databases share; a subclass says how to connect and where their SQL differs."""

    name: str
    """For messages: where the store is, without a password."""

    # What a subclass defines.

    @abstractmethod
    def open(self) -> None:
        """Create what is missing; StoreError if the database cannot be reached."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections of all threads."""

    @abstractmethod
    def transaction(self, write: bool = False) -> AbstractContextManager[Run]:
        """Run statements in one transaction of this thread's connection; StoreError if the database fails.

        Args:
            write: no other process may append at the same time.
        """

    @abstractmethod
    def among(self, values: Sequence[Any]) -> tuple[str, Any]:
        """SQL for `IN these values`, with one argument, and that argument."""

    @abstractmethod
    def existing(self, run: Run, keys: Sequence[tuple[int, str, str, int]]) -> set[tuple[int, str, str, int]]:
        """Those of (uid, item, kind, time) that the log has."""

    # Events.

    def append(self, submissions: Sequence[Submission], known: Callable[[str], bool]) -> list[int | KeyReused]:
        """Store the events of several requests in one transaction; they are durable when this returns.

        Returns for each request how many rows it stored, or `KeyReused`.

        Args:
            known: whether the model knows an item, to count those that it does not.
        """
        now = time.time()
        with self.transaction(write=True) as run:
            results: list[int | KeyReused] = []
            fresh: list[tuple[int, Submission]] = []
            keys: dict[str, tuple[str, int]] = {}
            for place, one in enumerate(submissions):
                before = self._earlier(run, one, keys)
                if before is None:
                    fresh.append((place, one))
                    if one.key is not None:
                        keys[one.key] = (one.digest, place)
                results.append(0 if before is None else before)
            stored = self._store(run, [one for _, one in fresh], int(now * 1e6), known)
            for (place, one), count in zip(fresh, stored, strict=True):
                results[place] = count
                if one.key is not None:
                    run("DELETE FROM requests WHERE key = ?", one.key)
                    run("INSERT INTO requests VALUES (?, ?, ?, ?)", one.key, one.digest, count, now)
            for place, one in enumerate(submissions):  # a second request with a key of this very transaction
                if one.key in keys and keys[one.key][1] != place and results[place] == 0:
                    results[place] = results[keys[one.key][1]]
            if keys:
                run("DELETE FROM requests WHERE at < ?", now - KEYS_LIVE)
        return results

    def _earlier(self, run: Run, one: Submission, keys: dict[str, tuple[str, int]]) -> int | KeyReused | None:
        """What an earlier request with the same key stored; None if there was none."""
        if one.key is None:
            return None
        if one.key in keys:
            return 0 if keys[one.key][0] == one.digest else KeyReused()
        found = run("SELECT digest, stored FROM requests WHERE key = ?", one.key)
        if not found:
            return None
        return int(found[0][1]) if found[0][0] == one.digest else KeyReused()

    def _store(self, run: Run, submissions: Sequence[Submission], now: int, known: Callable[[str], bool]) -> list[int]:
        """Store events that no earlier request had; returns the number of rows of each request."""
        accounts, new_users = self._accounts(run, {event.user for one in submissions for event in one.events})
        there = self.existing(
            run,
            [
                (accounts[event.user].uid, event.item, event.kind, event.time)
                for one in submissions
                for event in one.events
                if event.time is not None
            ],
        )
        numbers = {account.uid: account.events for account in accounts.values()}
        rows: list[tuple[Any, ...]] = []
        changes: list[tuple[Any, ...]] = []
        counts = []
        for one in submissions:
            count = 0
            for event in one.events:
                uid, at = accounts[event.user].uid, event.time
                if at is None:  # stamped here; a microsecond later if the same thing happens twice at once
                    at = now
                    while (uid, event.item, event.kind, at) in there or self._taken(run, uid, event, at):
                        at += 1
                key = (uid, event.item, event.kind, at)
                if key in there:
                    if one.overwrite:
                        changes.append((event.value, *key))
                        count += 1
                    continue
                there.add(key)
                numbers[uid] += 1
                rows.append((uid, numbers[uid], event.kind, event.item, at, event.value))
                count += 1
            counts.append(count)
        run.many("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
        run.many("UPDATE events SET value = ? WHERE uid = ? AND item = ? AND kind = ? AND time = ?", changes)
        run.many("UPDATE users SET events = ? WHERE uid = ?", [(n, uid) for uid, n in numbers.items()])
        unknown = sum(not known(row[3]) for row in rows)
        run(
            "UPDATE totals SET users = users + ?, events = events + ?, unknown = unknown + ?",
            new_users,
            len(rows),
            unknown,
        )
        return counts

    def _taken(self, run: Run, uid: int, event: Event, at: int) -> bool:
        statement = "SELECT 1 FROM events WHERE uid = ? AND item = ? AND kind = ? AND time = ?"
        return bool(run(statement, uid, event.item, event.kind, at))

    def _accounts(self, run: Run, names: set[str]) -> tuple[dict[str, Account], int]:
        """The accounts of users, made where missing, and how many were made."""
        found = self._find(run, names)
        missing = sorted(names - found.keys())
        if missing:
            run.many("INSERT INTO users (name, events) VALUES (?, 0)", [(name,) for name in missing])
            found.update(self._find(run, missing))
        return found, len(missing)

    def _find(self, run: Run, names: Iterable[str]) -> dict[str, Account]:
        among, argument = self.among(list(names))
        rows = run(f"SELECT name, uid, events FROM users WHERE name {among}", argument)
        return {name: Account(uid, events) for name, uid, events in rows}

    def accounts(self, names: Sequence[str]) -> dict[str, Account]:
        """The accounts of those users that are there."""
        with self.transaction() as run:
            return self._find(run, names)

    def events_after(self, uids: Sequence[int], numbers: Sequence[int]) -> list[list[Logged]]:
        """For each user the events after this number, oldest first."""
        statement = "SELECT number, kind, item, time, value FROM events WHERE uid = ? AND number > ? ORDER BY number"
        with self.transaction() as run:
            return [[Logged(*row) for row in run(statement, *pair)] for pair in zip(uids, numbers, strict=True)]

    def last_events(self, uid: int, most: int) -> list[Logged]:
        """The last events of a user, newest first."""
        statement = "SELECT number, kind, item, time, value FROM events WHERE uid = ? ORDER BY number DESC LIMIT ?"
        with self.transaction() as run:
            return [Logged(*row) for row in run(statement, uid, most)]

    def delete_user(self, name: str) -> tuple[int | None, int]:
        """Delete a user with all events and the state; returns the uid (None: there was none) and the number of events."""
        with self.transaction(write=True) as run:
            found = self._find(run, [name])
            if name not in found:
                return None, 0
            uid, events = found[name]
            for table in ("states", "events", "users"):
                run(f"DELETE FROM {table} WHERE uid = ?", uid)
            run("UPDATE totals SET users = users - 1, events = events - ?", events)
        return uid, events

    def find_users(self, prefix: str, most: int) -> list[tuple[str, int]]:
        """Users whose name starts with `prefix`, in order of their names, with their numbers of events."""
        statement = "SELECT name, events FROM users WHERE name >= ? AND name < ? ORDER BY name LIMIT ?"
        with self.transaction() as run:
            return [(name, events) for name, events in run(statement, prefix, prefix + "\U0010ffff", most)]

    def totals(self) -> Totals:
        with self.transaction() as run:
            return Totals(*run("SELECT users, events, unknown FROM totals")[0])

    # States.

    def states(self, uids: Sequence[int], model: int) -> dict[int, StateRow]:
        """The states of users that are there and belong to this model."""
        among, argument = self.among(list(uids))
        statement = f"SELECT uid, number, updated, state, seen, items FROM states WHERE uid {among} AND model = ?"
        with self.transaction() as run:
            rows = run(statement, argument, model)
        found = (StateRow(uid, number, at, bytes(x), bytes(seen), items) for uid, number, at, x, seen, items in rows)
        return {row.uid: row for row in found}

    def put_states(self, rows: Sequence[StateRow], model: int) -> None:
        """Store states, except where a newer one is there or the user is gone."""
        statement = (
            "INSERT INTO states (uid, model, number, updated, state, seen, items) SELECT ?, ?, ?, ?, ?, ?, ? "
            "WHERE EXISTS (SELECT 1 FROM users WHERE uid = ?) ON CONFLICT (uid) DO UPDATE SET model = excluded.model, "
            "number = excluded.number, updated = excluded.updated, state = excluded.state, seen = excluded.seen, "
            "items = excluded.items WHERE states.model <> excluded.model OR states.number < excluded.number "
            "OR (states.number = excluded.number AND states.items < excluded.items)"
        )
        with self.transaction() as run:
            run.many(statement, [(r.uid, model, *r[1:], r.uid) for r in sorted(rows)])

    # The model that states belong to.

    def fact(self, name: str) -> str | None:
        with self.transaction() as run:
            found = run("SELECT value FROM facts WHERE name = ?", name)
        return found[0][0] if found else None

    def set_fact(self, name: str, value: str) -> None:
        with self.transaction(write=True) as run:
            run("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", name, value)

    def model_number(self, identity: str, name: str) -> int:
        """The number that stands for a model in this store; a new one for a new model."""
        with self.transaction(write=True) as run:
            found = run("SELECT id FROM models WHERE identity = ?", identity)
            if not found:
                last = run("SELECT coalesce(max(id), 0) FROM models")[0][0]
                run("INSERT INTO models VALUES (?, ?, ?)", last + 1, identity, name)
                return int(last) + 1
            run("UPDATE models SET name = ? WHERE id = ?", name, found[0][0])  # the folder may have been renamed
            return int(found[0][0])

    # Items that were described to the service, known to the model or not.

    def hidden_items(self) -> list[str]:
        """Items that must not be recommended."""
        with self.transaction() as run:
            return [item for (item,) in run("SELECT item FROM items WHERE hidden = 1")]

    def put_items(self, items: Sequence[tuple[str, bool, str]], labels: Sequence[tuple[str, str]] = ()) -> None:
        """Store items: (id, whether it must not be recommended, fields as JSON).

        Args:
            labels: (id, labels as JSON), which become the next descriptions; one that is already there is not stored again.
        """
        statement = (
            "INSERT INTO items VALUES (?, ?, ?) ON CONFLICT (item) "
            "DO UPDATE SET hidden = excluded.hidden, fields = excluded.fields"
        )
        digests = [(item, hashlib.sha256(text.encode()).hexdigest(), text) for item, text in labels]
        with self.transaction(write=True) as run:
            run.many(statement, [(item, int(hidden), fields) for item, hidden, fields in items])
            run.many("INSERT INTO described (item, digest, labels) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", digests)

    def described_after(self, number: int) -> list[tuple[int, str, str]]:
        """Descriptions of items after this number, in the order in which they were stored: (number, id, labels as JSON).

        They are never changed or removed: the rows of a model's catalogue follow from them.
        """
        statement = "SELECT number, item, labels FROM described WHERE number > ? ORDER BY number"
        with self.transaction() as run:
            return [(found, item, labels) for found, item, labels in run(statement, number)]

    def first_events(self, uids: Sequence[int], items: Sequence[str]) -> dict[int, int]:
        """The number of the first event with one of these items, of the users that have one."""
        (users, uid_list), (among, item_list) = self.among(list(uids)), self.among(list(items))
        statement = f"SELECT uid, min(number) FROM events WHERE uid {users} AND item {among} GROUP BY uid"
        with self.transaction() as run:
            return dict(run(statement, uid_list, item_list))


class Run(ABC):
    """Runs statements on a connection."""

    @abstractmethod
    def __call__(self, statement: str, *arguments: Any) -> list[Any]:
        """Run one statement; returns its rows."""

    @abstractmethod
    def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each row of arguments."""


def tables(integer: str, real: str, blob: str, text: str, serial: str) -> Iterator[str]:
    """The statements that create the tables, with the types of a database."""
    yield f"CREATE TABLE IF NOT EXISTS facts (name {text} PRIMARY KEY, value {text} NOT NULL)"
    yield f"CREATE TABLE IF NOT EXISTS models (id {integer} PRIMARY KEY, identity {text} NOT NULL, name {text} NOT NULL)"
    yield f"CREATE TABLE IF NOT EXISTS totals (users {integer}, events {integer}, unknown {integer})"
    yield "INSERT INTO totals SELECT 0, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM totals)"
    yield f"CREATE TABLE IF NOT EXISTS users (uid {serial}, name {text} NOT NULL UNIQUE, events {integer} NOT NULL)"
    yield (
        f"CREATE TABLE IF NOT EXISTS events (uid {integer}, number {integer}, kind {text} NOT NULL, item {text} NOT NULL, "
        f"time {integer} NOT NULL, value {real}, PRIMARY KEY (uid, number))"
    )
    yield "CREATE UNIQUE INDEX IF NOT EXISTS events_once ON events (uid, item, kind, time)"
    yield (
        f"CREATE TABLE IF NOT EXISTS requests (key {text} PRIMARY KEY, digest {text} NOT NULL, stored {integer} NOT NULL, "
        f"at {real} NOT NULL)"
    )
    yield "CREATE INDEX IF NOT EXISTS requests_at ON requests (at)"
    yield (
        f"CREATE TABLE IF NOT EXISTS items (item {text} PRIMARY KEY, hidden {integer} NOT NULL, fields {text} NOT NULL)"
    )
    yield "CREATE INDEX IF NOT EXISTS items_hidden ON items (hidden)"
    yield (  # the digest stands for the labels, which may be too long for an index
        f"CREATE TABLE IF NOT EXISTS described (number {serial}, item {text} NOT NULL, digest {text} NOT NULL, "
        f"labels {text} NOT NULL, UNIQUE (item, digest))"
    )
    yield (
        f"CREATE TABLE IF NOT EXISTS states (uid {integer} PRIMARY KEY, model {integer} NOT NULL, "
        f"number {integer} NOT NULL, updated {real} NOT NULL, state {blob} NOT NULL, seen {blob} NOT NULL, "
        f"items {integer} NOT NULL)"
    )
