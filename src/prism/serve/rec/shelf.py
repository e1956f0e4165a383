"""Where states rest: in the store, written by a thread behind the engine.

States are derived from the events. A write that fails is logged and costs reading time, nothing else.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from prism.serve.rec.store import StateRow, Store, StoreError

log = logging.getLogger("prism.serve")


class Shelf:
    """Reads states, and writes them in a thread.

    Args:
        model: the number of the model in the store.
    """

    def __init__(self, store: Store, model: int) -> None:
        self.store, self.model = store, model
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
        return self.store.states(uids, self.model)

    def save(self, rows: list[StateRow]) -> None:
        """Take states to be written; waits only if eight batches are already waiting."""
        self._waiting.put(rows)

    def _run(self) -> None:
        while (rows := self._waiting.get()) is not None:
            try:
                self.store.put_states(rows, self.model)
            except StoreError as error:
                fields = {"reason": str(error), "states": len(rows)}
                log.warning("states not stored, they will be read from the events again", extra={"fields": fields})
            except Exception:
                log.exception("states not stored")
