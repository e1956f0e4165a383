"""Messages for people on the error stream: lines, progress bars, and the "did you mean" of an unknown name."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

CLOSE = 0.6
"""Similarity, from 0 to 1, from which a known name is suggested."""


def say(message: str) -> None:
    """Print a line to the error stream; the output is for results."""
    print(message, file=sys.stderr)


def progress_bars(*columns: ProgressColumn) -> Progress:
    """Progress bars of rich on the error stream; a task shows its description, the bar, `columns` and the time left."""
    from rich.console import Console  # rich comes with the extra `cli`: the core must be importable without it
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(), console=console)


def did_you_mean(asked: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """` (did you mean 'x'?)` for the closest known name, or an empty string if none is close.

    Args:
        show: how the name is written in the sentence.
    """
    similarity = {name: _similarity(name, asked) for name in known}
    best = max(similarity, key=lambda name: similarity[name], default=None)
    return "" if best is None or similarity[best] < CLOSE else f" (did you mean {show(best)}?)"


def _similarity(known: str, asked: str) -> float:
    """Similarity of two names. Dashes in front and a section that both share do not count: every flag has them."""
    known, asked = known.lstrip("-"), asked.lstrip("-")
    (section, _, name), (asked_section, _, asked_name) = known.rpartition("."), asked.rpartition(".")
    if section == asked_section:
        known, asked = name, asked_name
    return difflib.SequenceMatcher(None, known, asked).ratio()
