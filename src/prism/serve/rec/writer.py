"""Group commit: a thread that stores the events of all requests that wait, in one durable transaction."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from prism.serve.rec.store import KeyReused, Store, StoreError, Submission

log = logging.getLogger("prism.serve")
MOST_EVENTS = 20_000
"""Most events in one transaction."""


class Writer:
    """Appends events. While one transaction is synced to disk, the requests of the next one collect.

    Args:
        known: whether the model knows an item.
        stored: called with the users of a transaction after it is durable.
    """

    def __init__(self, store: Store, known: Callable[[str], bool], stored: Callable[[list[str]], None]) -> None:
        self.store, self.known, self.stored = store, known, stored
        self._waiting: queue.SimpleQueue[tuple[Submission, asyncio.Future[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Store what waits, then stop."""
        self._waiting.put(None)
        self._thread.join()

    async def append(self, submission: Submission) -> int:
        """Store the events of a request; returns the number of rows when they are durable.

        Raises StoreError if nothing was stored, KeyReused if the idempotency key belongs to other events.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.put((submission, future))
        return await future

    def _run(self) -> None:
        going = True
        while going:
            group = [self._waiting.get()]
            events = 0
            while group[-1] is not None and events < MOST_EVENTS:
                events += len(group[-1][0].events)
                try:
                    group.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            going = group[-1] is not None
            if requests := [one for one in group if one is not None]:
                self._commit(requests)

    def _commit(self, group: list[tuple[Submission, asyncio.Future[int]]]) -> None:
        results: list[int | KeyReused | StoreError]
        try:
            results = list(self.store.append([submission for submission, _ in group], self.known))
        except StoreError as error:
            log.error("events refused", extra={"fields": {"reason": str(error), "requests": len(group)}})
            results = [error] * len(group)
        except Exception as error:  # a fault of the program must not leave requests waiting for ever
            log.exception("events refused")
            results = [StoreError(f"the events could not be stored: {type(error).__name__}")] * len(group)
        else:
            self.stored(sorted({event.user for submission, _ in group for event in submission.events}))
        futures = [future for _, future in group]
        futures[0].get_loop().call_soon_threadsafe(_resolve, futures, results)


def _resolve(futures: list[asyncio.Future[int]], results: list[int | KeyReused | StoreError]) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # the client has gone
            continue
        if isinstance(result, int):
            future.set_result(result)
        else:
            future.set_exception(result)
