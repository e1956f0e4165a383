"""Messages for users: lines and progress bars on standard error, suggestions for misspelt names, missing extras."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.text import Text

INTERRUPTED = 130
"""Exit code after a signal, even if everything was saved: a script must not continue as if the command had finished."""
CLOSE = 0.6
"""Suggest a known name from this similarity (0 to 1) on."""
_CLI = ("tyro", "rich")
_LM = ("transformers", "tokenizers", "datasets", "tensorboard", "filelock", *_CLI)
_REC = ("transformers", "polars", "filelock", *_CLI)
LIBRARIES = {
    "cli": _CLI,
    "plots": ("matplotlib",),
    "lm": _LM,
    "rec": _REC,
    "eval": ("lm_eval", *_LM),
    "gpu": ("triton",),
    "adapters": ("peft", *_LM),
    "onnx": ("onnx", "onnxscript", "onnxruntime", *_LM),
    "trackers": ("wandb", "mlflow"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "psycopg", "psycopg_pool", "redis", "starlette", *_LM, *_REC),
    "baselines": ("implicit", "scipy", "threadpoolctl", *_REC),
}
"""The libraries that each extra installs, its own and those of the extras that it includes."""


def say(message: str) -> None:
    """Print a line to standard error; standard output is for results."""
    print(message, file=sys.stderr)


def progress_bars(*columns: ProgressColumn) -> Progress:
    """Progress bars of rich on the error stream; a task shows its description, the bar, `columns` and the time left."""
    from rich.console import Console  # rich comes with the extra `cli`: the core must be importable without it
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console, name = Console(stderr=True), TextColumn("{task.description}", markup=False)
    return Progress(name, BarColumn(), *columns, TimeRemainingColumn(), console=console)


def verbatim(cells: Iterable[str], style: str = "") -> list[Text]:
    """Cells or titles of a table of rich that show data: in plain strings it takes `[words]` and `:words:` for markup."""
    from rich.text import Text

    return [Text(cell, style) for cell in cells]


@contextmanager
def needs_extra(package: str, extra: str) -> Iterator[None]:
    """Around imports of `package`: an error for a library that is missing says which extra installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        advice = missing_extra(error, extra)
        if advice is None:
            raise
        raise ModuleNotFoundError(f"{package} {advice}", name=error.name) from error


def did_you_mean(asked: str, known: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """` (did you mean 'x'?)` for the closest known name, or an empty string if none is close.

    Args:
        show: formats the suggested name.
    """
    similarity = {name: _similarity(name, asked) for name in known}
    best = max(similarity, key=lambda name: similarity[name], default=None)
    return "" if best is None or similarity[best] < CLOSE else f" (did you mean {show(best)}?)"


def _similarity(known: str, asked: str) -> float:
    """Similarity of two names, from 0 to 1. Leading dashes and a shared section are ignored: all flags have them."""
    known, asked = known.lstrip("-"), asked.lstrip("-")
    (section, _, name), (asked_section, _, asked_name) = known.rpartition("."), asked.rpartition(".")
    if section == asked_section:
        known, asked = name, asked_name
    return difflib.SequenceMatcher(None, known, asked).ratio()


def install(extra: str) -> str:
    """The command that installs an extra. It names no distribution: none is published."""
    return f'pip install ".[{extra}]" in a clone, or "FILE.whl[{extra}]"'


def missing_extra(error: BaseException, likely: str) -> str | None:
    """The message for a library of an extra that is not installed; None for any other error.

    Args:
        likely: the extra to name if it installs the library; otherwise the first one that does.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    extras = [extra for extra, modules in LIBRARIES.items() if module in modules]
    if not extras:
        return None
    extra = likely if likely in extras else extras[0]
    return f"needs {module}, from the extra {extra}: {install(extra)}"
