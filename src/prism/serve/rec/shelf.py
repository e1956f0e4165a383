"""Where states rest: in the store, written by a thread behind the engine, and optionally in Redis in front of it.

States are derived from the events. A write that fails is logged and costs reading time, nothing else.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from prism.serve.rec.store import StateRow, Store, StoreError

log = logging.getLogger("prism.serve")
REDIS_SECONDS = 86_400
"""How long an unused state stays in Redis."""
PAUSE = 30.0
"""Seconds without Redis after it failed."""
_HEAD = struct.Struct("<qqdi")


class Shelf:
    """Reads states, and writes them in a thread.

    Args:
        model: the number of the model in the store.
    """

    def __init__(self, store: Store, model: int, cache: RedisCache | None = None) -> None:
        self.store, self.model, self.cache = store, model, cache
        self._waiting: queue.Queue[list[StateRow] | None] = queue.Queue(maxsize=8)
        self._thread = threading.Thread(target=self._run, name="states", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, then stop."""
        self._waiting.put(None)
        self._thread.join()

    def load(self, uids: Sequence[int]) -> dict[int, StateRow]:
        """The states of users, as far as there are any of this model."""
        found = {} if self.cache is None else self.cache.get(uids)
        rest = [uid for uid in uids if uid not in found]
        return {**found, **(self.store.states(rest, self.model) if rest else {})}

    def save(self, rows: list[StateRow]) -> None:
        """Take states to be written; waits only if eight batches are already waiting."""
        self._waiting.put(rows)

    def forget(self, uid: int) -> None:
        """Remove a deleted user's state from the cache; the store has removed its own."""
        if self.cache is not None:
            self.cache.delete(uid)

    def _run(self) -> None:
        while (rows := self._waiting.get()) is not None:
            if self.cache is not None:
                self.cache.put(rows)
            try:
                self.store.put_states(rows, self.model)
            except StoreError as error:
                fields = {"reason": str(error), "states": len(rows)}
                log.warning("states not stored, they will be read from the events again", extra={"fields": fields})
            except Exception:
                log.exception("states not stored")


class RedisCache:
    """States in Redis. If it does not answer, the service works without it and tries again later.

    Args:
        url: such as `redis://host:6379/0`.
        prefix: of the keys: names the store and the model, so that no other state is taken for this one.
    """

    def __init__(self, url: str, prefix: str) -> None:
        import redis

        self._errors = redis.RedisError
        self._redis = redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._prefix, self._resume = prefix, 0.0

    def check(self) -> None:
        """Raise ValueError if Redis cannot be reached."""
        try:
            self._redis.ping()
        except self._errors as error:
            raise ValueError(
                f"state_cache does not answer: {error}; start Redis, or leave --state-cache out"
            ) from error

    def get(self, uids: Sequence[int]) -> dict[int, StateRow]:
        if not uids or time.monotonic() < self._resume:
            return {}
        try:
            values: list[Any] = self._redis.mget([self._key(uid) for uid in uids])
        except self._errors as error:
            return self._failed(error)
        return {uid: _decode(uid, value) for uid, value in zip(uids, values, strict=True) if value is not None}

    def put(self, rows: Sequence[StateRow]) -> None:
        if time.monotonic() < self._resume:
            return
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for row in rows:
                    pipe.set(self._key(row.uid), _encode(row), ex=REDIS_SECONDS)
                pipe.execute()
        except self._errors as error:
            self._failed(error)

    def delete(self, uid: int) -> None:
        try:
            self._redis.delete(self._key(uid))
        except self._errors as error:
            self._failed(error)

    def _key(self, uid: int) -> str:
        return f"{self._prefix}:{uid}"

    def _failed(self, error: Exception) -> dict[int, StateRow]:
        self._resume = time.monotonic() + PAUSE
        log.warning("Redis does not answer, states come from the store", extra={"fields": {"reason": str(error)}})
        return {}


def _encode(row: StateRow) -> bytes:
    return _HEAD.pack(row.number, row.items, row.updated, len(row.seen)) + row.seen + row.state


def _decode(uid: int, value: bytes) -> StateRow:
    number, items, updated, length = _HEAD.unpack_from(value)
    start = _HEAD.size + length
    return StateRow(uid, number, updated, value[start:], value[_HEAD.size : start], items)
