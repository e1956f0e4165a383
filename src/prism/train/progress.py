"""What a person sees: a bar with loss, speed and time left; in a file or a pipe, a line now and then."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Shown by the main process only."""

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
        self.console.print(message, markup=False)

    def update(self, step: int, loss: float, speed: float, line: bool) -> None:
        """After every step; `line` says whether this one is worth a line where there is no bar."""
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


# SIGTERM and SIGINT ask the run to save and end; a second one ends it at once.


class StopRequest:
    """A context in which `name` tells which signal came, if any."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only there does Python allow handlers
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
