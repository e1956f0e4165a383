"""Read all histories again in the background after the model changed, while the service answers.

Users who ask before their turn are read on demand. The place is stored, so that a restart continues.
"""

from __future__ import annotations

import logging
import threading
import time

from prism.serve.logs import say_event
from prism.serve.rec.engine import Engine
from prism.serve.rec.store import Store, StoreError

log = logging.getLogger("prism.serve")
FACT = "rebuild"
"""The fact in the store that holds the uid of the last user that was read."""
USERS_AT_ONCE = 32
"""Few, because a request waits until they are done."""
LOG_SECONDS = 5.0
RETRY_SECONDS = 2.0


class Rebuild:
    """A thread that reads histories, a few users at a time, through the engine.

    `done` and `total` are its progress in users.
    """

    def __init__(self, store: Store, engine: Engine) -> None:
        self.store, self.engine = store, engine
        self.done = self.total = 0
        self.finished = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rebuild", daemon=True)

    def start(self) -> None:
        """Start, or continue where an earlier process was stopped."""
        self.total = self.store.totals().users
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last, logged, started = int(self.store.fact(FACT) or 0), 0.0, time.monotonic()
        say_event("rebuild: reading histories again", users=self.total)
        while not self._stop.is_set():
            try:
                users = self.store.users_after(last, USERS_AT_ONCE)
                if not users:
                    self.store.set_fact(FACT, None)
                    break
                if not self._read([name for _, name, events in users if events]):
                    raise StoreError("the engine could not read the histories")
                last = users[-1][0]
                self.done += len(users)
                self.total = max(self.total, self.done)
                if time.monotonic() - logged > LOG_SECONDS:
                    logged = time.monotonic()
                    self.store.set_fact(FACT, str(last))
                    say_event("rebuild: progress", done=self.done, total=self.total)
            except StoreError as error:
                log.warning("rebuild: waiting for the store", extra={"fields": {"reason": str(error)}})
                self._stop.wait(RETRY_SECONDS)
        else:
            return
        self.finished = True
        say_event("rebuild: finished", users=self.done, seconds=round(time.monotonic() - started, 1))

    def _read(self, names: list[str]) -> bool:
        """Have the engine read these users' histories; returns whether it did."""
        ended, succeeded = threading.Event(), False

        def read() -> None:
            nonlocal succeeded
            try:
                self.engine.memory.bring(names)
                self.engine.memory.flush(most=2 * USERS_AT_ONCE)
                succeeded = True
            finally:
                ended.set()

        self.engine.call(read)
        while not ended.wait(1.0):
            if self._stop.is_set():
                return False
        return succeeded
