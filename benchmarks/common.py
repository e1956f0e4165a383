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


def _in_turns(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times
