"""Timing for benchmarks: candidates take turns, so that a busy moment hits them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def fastest(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds, the minimum of `repeats` for each."""
    return {name: min(seconds) for name, seconds in _in_turns(candidates, repeats).items()}


def typical(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds, the median of `repeats` for each: where a disturbance belongs to the question."""
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
