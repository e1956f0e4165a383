"""Means with standard errors, and differences between rules that are paired by seed.

A difference counts if 0 is outside its 95 % confidence interval by Student's t. Few seeds know their own spread badly, which
t allows for: three need 4.3 standard errors, five 2.8, many 2. Two standard errors would call every fifth pair of equal
rules different with three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FEWEST = 3
"""Seeds that a verdict needs: two may agree by chance, and their standard error is then far too small."""
_T = (
    *(4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
"""The .975 quantiles of Student's t for 3, 4, … 30 values."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error s / √n, where s is the sample's standard deviation; NaN for fewer than two values."""

    mean: float
    error: float
    count: int

    @property
    def half_width(self) -> float:
        """Half of the mean's 95 % confidence interval; infinite for fewer than three values."""
        return math.inf if self.count < FEWEST else errors(self.count) * self.error

    @property
    def significant(self) -> bool:
        """Whether 0 is outside the mean's 95 % confidence interval; never with fewer than three values."""
        return abs(self.mean) > self.half_width

    def text(self, digits: int = 3, sign: bool = False) -> str:
        """`0.941 ± 0.021`, or without the error if there is none."""
        if self.count == 0:
            return "–"
        mean = f"{self.mean:+.{digits}f}" if sign else f"{self.mean:.{digits}f}"
        return mean if math.isnan(self.error) else f"{mean} ± {self.error:.{digits}f}"


def errors(count: int) -> float:
    """The standard errors that a mean of `count` ≥ 3 values must differ from 0 by, to be significant at 5 %."""
    return _T[min(count, len(_T) + FEWEST - 1) - FEWEST]


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
