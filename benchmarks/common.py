"""Timing for benchmarks: candidates take turns, so that a busy moment hits them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def fastest(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds, the minimum of `repeats` for each."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in times.items()}
