"""Time candidates in turns, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any


def fastest(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds of each candidate: the minimum of `repeats`."""
    return {name: min(seconds) for name, seconds in _in_turns(candidates, repeats).items()}


def typical(candidates: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, float]:
    """Seconds of each candidate: the median of `repeats`, for measurements under a disturbance."""
    return {name: median(seconds) for name, seconds in _in_turns(candidates, repeats).items()}


def paired(
    candidate: Callable[[], Any], reference: Callable[[], Any], repeats: int, alone: bool = True
) -> tuple[float, float, float]:
    """Seconds of two candidates, and of the first over the second: the medians of `repeats` turns.

    The ratio is taken turn by turn, so that slow and fast phases of the machine cancel, and every second turn begins with the
    other candidate. Each runs twice in a turn, and the second time counts: the first gets the heap as the other left it, full
    of holes or given back to the system, which no training step or request after another one does. With `alone`, turns do
    not count in which other processes used more than a twentieth of a core (Linux), or around which a matrix product took
    over a tenth longer than at its best: on a rented machine neighbours on the same cores are not seen otherwise.
    """
    turns: list[tuple[float, float]] = []
    candidate(), reference()
    for turn in range(_MOST_TURNS * repeats):
        order = (candidate, reference) if turn % 2 else (reference, candidate)
        slowed, before = alone and _is_slowed(), _used_by_others()
        found = {run: (run(), _seconds(run))[1] for run in order}
        used = _used_by_others() - before
        if not alone or (not slowed and used <= max(_TICKS, sum(found.values()) / 10) and not _is_slowed()):
            turns.append((found[candidate], found[reference]))
        if len(turns) == repeats:
            ours, theirs = zip(*turns, strict=True)
            return median(ours), median(theirs), median(a / b for a, b in turns)
    raise SystemExit("other processes or machines use the processor: nothing was measured")


_MOST_TURNS = 40
"""Turns for each that counts."""
_TICKS = 0.03
"""Seconds; the system counts in hundredths for each core."""


_products: list[float] = []
"""Seconds of the matrix products so far."""


def _is_slowed() -> bool:
    """Whether a matrix product takes longer now than it did at its best."""
    import torch

    x = torch.ones(1024, 1024)
    _products.append(min(_seconds(lambda: x @ x) for _ in range(3)))
    return _products[-1] > 1.1 * min(_products)


def _used_by_others() -> float:
    """Seconds of processor time that other processes have used; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    except FileNotFoundError:
        return 0.0
    user, nice, system, _idle, _waiting, *rest = (int(field) for field in fields)
    own = os.times()
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


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
