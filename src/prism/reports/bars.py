"""Progress bars of commands that measure."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bars(*columns: ProgressColumn) -> Progress:
    """Bars on the error stream, one a task: its description, the bar, `columns`, the time left."""
    console = Console(stderr=True)
    return Progress(TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(), console=console)
