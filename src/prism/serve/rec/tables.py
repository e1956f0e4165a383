"""The tables of the store, as SQL for either database."""

from __future__ import annotations

from collections.abc import Iterator


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
