"""Means, standard errors and paired differences, against the formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab.statistics import FEWEST, Estimate, errors, estimate, paired

VALUES = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


@given(VALUES)
def test_the_standard_error_is_that_of_the_definition(values: list[float]) -> None:
    found = estimate(values)
    n, mean = len(values), sum(values) / len(values)
    pairs = sum((a - b) ** 2 for a in values for b in values)  # the variance without the mean: Σ (a - b)² / 2n(n - 1)
    assert found.count == n and found.mean == pytest.approx(mean, abs=1e-9)
    assert found.error == pytest.approx(math.sqrt(pairs / (2 * n * (n - 1)) / n), abs=1e-6)


def test_one_value_has_no_error_and_none_no_mean() -> None:
    assert estimate([3.0]).mean == 3.0 and math.isnan(estimate([3.0]).error)
    assert not estimate([3.0]).significant
    assert estimate([]).count == 0 and math.isnan(estimate([]).mean) and estimate([]).text() == "–"


def test_differences_are_paired_by_seed() -> None:
    """What both share at a seed cancels: a constant gain has no error, however much the seeds differ."""
    reference = {0: 0.1, 1: 0.9, 2: 0.5}
    gain = paired({seed: value + 0.25 for seed, value in reference.items()}, reference)
    assert gain.mean == pytest.approx(0.25) and gain.error == pytest.approx(0, abs=1e-12) and gain.significant
    assert paired({0: 1.0, 7: 5.0}, {0: 0.5, 8: 1.0}) == estimate([0.5])
    by_hand = paired({0: 1.0, 1: 3.0, 2: 2.0}, {0: 0.0, 1: 1.0, 2: 3.0})  # 1, 2, -1
    assert by_hand.mean == pytest.approx(2 / 3) and by_hand.error == pytest.approx(math.sqrt(7 / 3 / 3))


@pytest.mark.parametrize(
    ("mean", "error", "count", "expected"),
    [
        (0.44, 0.1, 3, True),
        (-0.44, 0.1, 3, True),
        (0.42, 0.1, 3, False),
        (0.28, 0.1, 5, True),
        (0.27, 0.1, 5, False),
        (5.0, math.nan, 1, False),
        (5.0, 0.1, 2, False),
        (0.0, 0.0, 3, False),
    ],
)
def test_significant_is_outside_the_interval_of_students_t(
    mean: float, error: float, count: int, expected: bool
) -> None:
    assert Estimate(mean, error, count).significant is expected


@pytest.mark.parametrize("count", [3, 4, 5, 10, 30])
def test_equal_rules_differ_in_one_of_twenty_comparisons(count: int) -> None:
    """The quantiles, by drawing: differences of normal noise are called significant in 5 % of cases."""
    found = torch.randn(200_000, count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    t = found.mean(1).abs() / (found.std(1) / math.sqrt(count))
    assert (t > errors(count)).double().mean().item() == pytest.approx(0.05, abs=0.0025)


def test_more_seeds_need_fewer_errors() -> None:
    needed = [errors(count) for count in range(FEWEST, 40)]
    assert needed == sorted(needed, reverse=True) and needed[-1] > 1.96


def test_text_has_a_sign_only_where_asked() -> None:
    assert Estimate(0.9412, 0.0213, 3).text() == "0.941 ± 0.021"
    assert Estimate(0.02, 0.0213, 3).text(2, sign=True) == "+0.02 ± 0.02"
    assert Estimate(0.5, math.nan, 1).text() == "0.500"
