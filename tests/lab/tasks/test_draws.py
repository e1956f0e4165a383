"""Draws for whole batches: different numbers, equally likely, on both ways that they are drawn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab.tasks.draws import distinct, others


@given(st.data(), st.integers(0, 5), st.integers(0, 2**31))
def test_numbers_of_a_row_differ(data: st.DataObject, rows: int, seed: int) -> None:
    pool = data.draw(st.integers(1, 1000))
    count = data.draw(st.integers(0, min(pool, 40)))
    numbers = distinct(rows, count, pool, torch.Generator().manual_seed(seed))
    assert numbers.shape == (rows, count) and numbers.dtype == torch.long
    for row in numbers.tolist():
        assert len(set(row)) == count and all(0 <= number < pool for number in row)


@pytest.mark.parametrize("pool", [256, 257], ids=["shuffled", "drawn until different"])
def test_every_pair_in_order_is_equally_likely(pool: int) -> None:
    count = 40_000
    first, second = distinct(count, 2, pool, torch.Generator().manual_seed(0)).T
    shares = (first * pool + second).bincount(minlength=pool * pool) / count
    wanted = (1 - torch.eye(pool)).flatten() / (pool * (pool - 1))
    # The sum of squares is about χ² with pool² - pool - 1 degrees of freedom: within five standard deviations.
    freedom = pool * (pool - 1) - 1
    statistic = count * ((shares - wanted).square() * (pool * (pool - 1))).sum().item()
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_more_numbers_are_drawn_where_too_many_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [torch.full((5, 7), 9), torch.tensor([[4, 8, 4, 1, 8, 2, 3]]).expand(5, 7)]
    monkeypatch.setattr(torch, "randint", lambda *shape, **options: draws.pop(0))
    assert distinct(5, 3, 300, torch.Generator()).tolist() == [[9, 4, 8]] * 5
    assert not draws


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_others_are_never_taken(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    taken = distinct(4, n, 13, generator)
    for used, row in zip(taken.tolist(), others(taken, 30, 13, generator).tolist(), strict=True):
        assert not set(used) & set(row) and set(row) <= set(range(13))


def test_others_are_equally_likely() -> None:
    taken = torch.tensor([[5, 0, 6, 9]])
    shares = others(taken, 60_000, 10, torch.Generator().manual_seed(0)).flatten().bincount(minlength=10) / 60_000
    free = torch.tensor([0, 1, 1, 1, 1, 0, 0, 1, 1, 0]) / 6
    assert (shares - free).abs().max() < 4 * (5 / 36 / 60_000) ** 0.5


def test_too_many_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be between 0 and pool = 3, got 4"):
        distinct(1, 4, 3, torch.Generator())
