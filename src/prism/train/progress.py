"""What a person sees: a bar with loss, speed and time left; in a file or a pipe, a line now and then."""

from __future__ import annotations

from types import TracebackType

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
