"""Signals from the user: SIGTERM, SIGINT and SIGHUP ask a run to save and stop; a second signal stops it at once.

SIGHUP says that the terminal was closed. It often comes twice, from the system and from the shell, so the second changes
nothing; under nohup it is ignored.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not on Windows


class StopRequest:
    """A context that catches these signals; `name` is the one received, or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            hangup = [] if _HANGUP is None or signal.getsignal(_HANGUP) == signal.SIG_IGN else [_HANGUP]
            for number in (signal.SIGTERM, signal.SIGINT, *hangup):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()
        if number == _HANGUP:
            self._before[_HANGUP] = signal.signal(number, signal.SIG_IGN)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
