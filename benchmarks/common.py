"""Time candidates in turns, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def fastest(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds of each candidate: the minimum of `repeats`."""
    return {name: min(seconds) for name, seconds in _in_turns(candidates, repeats).items()}


def typical(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds of each candidate: the median of `repeats`, for measurements under a disturbance."""
    return {name: median(seconds) for name, seconds in _in_turns(candidates, repeats).items()}


def paired(candidate: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Seconds of two candidates, and of the first over the second: the medians of `repeats` turns.

    The ratio is taken turn by turn, so that slow and fast phases of the machine cancel, and every second turn begins with the
    other candidate.
    """
    turns = []
    for turn in range(repeats + 1):
        order = (candidate, reference) if turn % 2 else (reference, candidate)
        found = {run: _seconds(run) for run in order}
        turns.append((found[candidate], found[reference]))
    ours, theirs = zip(*turns[1:], strict=True)  # the first turn warms up
    return median(ours), median(theirs), median(a / b for a, b in turns[1:])


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _in_turns(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeats):
        for name, run in candidates.items():
            times[name].append(_seconds(run))
    return times
