"""Progress of a run for the user, and signals from the user.

On a terminal a bar shows loss, speed and time left; in a file or a pipe a line is printed now and then. SIGTERM and
SIGINT ask the run to save and stop; a second signal stops it at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A progress bar, or lines where there is no terminal; only the main process shows it."""

    def __init__(self, step: int, steps: int, shown: bool, unit: str = "tokens") -> None:
        self.console = Console(stderr=True, quiet=not shown, soft_wrap=True, highlight=False)
        self._lines = not self.console.is_terminal
        self._steps, self._unit = steps, unit
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"loss {{task.fields[loss]}}  {{task.fields[speed]}} {unit}/s  left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=self._lines or not shown,
        )
        self._task = self._progress.add_task("training", total=steps, completed=step, loss="–", speed="–")

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self.console.print(message, markup=False)

    def update(self, step: int, loss: float, speed: float, line: bool) -> None:
        """Show a step; `line`: also print it as a line where there is no bar."""
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")
        if line and self._lines:
            left = self._progress.tasks[self._task].time_remaining
            when = "" if left is None else f", {left:.0f} s left"
            self.say(f"step {step}/{self._steps}: loss {loss:.4f}, {speed:,.0f} {self._unit}/s{when}")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class StopRequest:
    """A context that catches SIGTERM and SIGINT; `name` is the signal received, or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
