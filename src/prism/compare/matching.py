"""Give every rule the same number of parameters, without changing its memory.

With a SwiGLU, its width is changed. Without one, the width of the model (the residual stream and every map from or to it) is
changed, while heads, key width and value width stay. Either way the state keeps its size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

TOLERANCE = 0.01
"""Largest relative difference between the numbers of parameters."""
_LARGE = 1 << 16
"""A value this large makes any model larger that it has an influence on."""
_STEPS = (64, 16, 8, 4, 2, 1)
"""Widths are multiples of the first of these that comes close enough: round widths are fast."""


def closest(count: Callable[[int], int], target: int) -> int:
    """The roundest value ≥ 1 whose count is within the tolerance of the target; `count` must not decrease."""
    count = cache(count)  # each call builds a model
    low, high = 1, 2
    while count(high) < target:
        if high >= _LARGE and count(high) == count(1):
            raise ValueError(
                f"it is {count(1):,} for every value, not {target:,}: remove the option that fixes the size"
            )
        low, high = high, max(2 * high, min(_line(count, low, high, target), 16 * high))
    halve = False
    while high - low > 1:  # count(low) < target ≤ count(high), or low is 1
        middle = (low + high) // 2 if halve else min(max(_line(count, low, high, target), low + 1), high - 1)
        low, high = (middle, high) if count(middle) < target else (low, middle)
        halve = not halve
    best = min((low, high), key=lambda value: abs(count(value) - target))
    for step in _STEPS:
        fit = {value: abs(count(value) - target) for value in (step * max(1, best // step), step * (best // step + 1))}
        found = min(fit, key=lambda value: fit[value])
        if fit[found] <= TOLERANCE * target:
            return found
    raise ValueError(f"the closest to {target:,} is {count(best):,}")


def _line(count: Callable[[int], int], low: int, high: int, target: int) -> int:
    """Where a line through the counts of two values reaches the target: for the width of a SwiGLU, the answer."""
    return low + (target - count(low)) * (high - low) // max(1, count(high) - count(low))
