"""Means with standard errors, and differences between rules that are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ERRORS = 2.0
"""A difference counts if it exceeds this many standard errors."""
FEWEST = 3
"""Seeds that a verdict needs: two may agree by chance, and their standard error is then far too small."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error s / √n, where s is the sample's standard deviation; NaN for fewer than two values."""

    mean: float
    error: float
    count: int

    @property
    def significant(self) -> bool:
        """Whether the mean differs from 0 by more than two standard errors; never with fewer than three values."""
        return self.count >= FEWEST and abs(self.mean) > ERRORS * self.error

    def text(self, digits: int = 3, sign: bool = False) -> str:
        """`0.941 ± 0.021`, or without the error if there is none."""
        if self.count == 0:
            return "–"
        mean = f"{self.mean:+.{digits}f}" if sign else f"{self.mean:.{digits}f}"
        return mean if math.isnan(self.error) else f"{mean} ± {self.error:.{digits}f}"


def estimate(values: Iterable[float]) -> Estimate:
    """The mean of values and its standard error."""
    found = list(values)
    n = len(found)
    if n == 0:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(found) / n
    if n == 1:
        return Estimate(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in found) / (n - 1)
    return Estimate(mean, math.sqrt(variance / n), n)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate:
    """The mean of value - reference over the seeds that both have.

    At one seed both have seen the same data, so what is common to both cancels.
    """
    return estimate(value - reference[seed] for seed, value in values.items() if seed in reference)
