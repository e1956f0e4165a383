"""The best items are found in slices, and are those of a sort of all scores: any sizes, filters, ties and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend import top_items
from prism.recommend.filters import Excluded
from prism.recommend.rerank import by_hand, rerank
from prism.recommend.top_items import best_rows, largest, most_popular, top_k


def by_sorting(scores: np.ndarray, k: int) -> list[list[float]]:
    """The k largest scores of each row that are above -inf; NaN is none of them."""
    usable = np.where(np.isnan(scores), -np.inf, scores)
    return [sorted((value for value in row if value > -np.inf), reverse=True)[:k] for row in usable.tolist()]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 400), st.integers(1, 30), st.integers(0, 99), st.booleans())
def test_the_largest_values(rows: int, many: int, k: int, seed: int, nan: bool) -> None:
    random = np.random.default_rng(seed)
    scores = random.integers(-9, 9, (rows, many)).astype(np.float32)  # with ties
    scores[random.random(scores.shape) < 0.1] = -np.inf
    if nan:
        scores[random.random(scores.shape) < 0.05] = np.nan
    values, places = largest(torch.from_numpy(scores), k)
    assert values.shape == (rows, min(k, many))
    assert [[value for value in row if value > -np.inf] for row in values.tolist()] == by_sorting(scores, k)
    picked = np.take_along_axis(scores, places.numpy(), 1)
    there = values.numpy() > -np.inf
    assert (picked[there] == values.numpy()[there]).all()
    assert all(len(set(row)) == len(row) for row in places.tolist()), "no place twice"
    for found, row in zip(places.tolist(), scores, strict=True):
        sure = [place for place in found if row[place] > -np.inf]
        usable = [place for place in range(many) if row[place] > -np.inf]  # not NaN
        assert sure == sorted(usable, key=lambda place: (-row[place], place))[: len(sure)], "of equal ones the first"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 70), st.integers(0, 99))
def test_slices_of_users_and_items_do_not_matter(users: int, items: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    hidden, vectors = random.standard_normal((users, 3)), random.standard_normal((items, 3))
    vectors[random.random(items) < 0.1] = np.nan
    unwanted = [np.flatnonzero(random.random(items) < 0.3) for _ in range(users)]
    scores = (hidden @ vectors.T).astype(np.float32)
    for user, rows in enumerate(unwanted):
        scores[user, rows] = -np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_items, "USERS_AT_ONCE", 3)
        patch.setattr(top_items, "SLICE", 51)
        rows, found = best_rows(*map(torch.from_numpy, (vectors, hidden)), Excluded.rows(unwanted), k)
    assert rows.shape == found.shape == (users, k)
    expected = by_sorting(scores, k)
    assert [len(row) for row in expected] == (rows >= 0).sum(1).tolist()
    for user, row in enumerate(expected):
        np.testing.assert_allclose(found[user, : len(row)], row, rtol=1e-5)
        np.testing.assert_allclose(scores[user, rows[user, : len(row)]], row, rtol=1e-5)
        assert (found[user, len(row) :] == -np.inf).all() and (rows[user, len(row) :] == -1).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 90), st.integers(1, 8), st.integers(0, 99))
def test_pages_of_equal_scores_fit_together(users: int, items: int, kinds: int, seed: int) -> None:
    """New items with the same features have the same score: a short list is the start of a longer one."""
    random = np.random.default_rng(seed)
    vectors = torch.from_numpy(random.integers(-2, 3, (kinds, 2)).astype(np.float32)[random.integers(0, kinds, items)])
    hidden = torch.from_numpy(random.integers(-2, 3, (users, 2)).astype(np.float32))
    unwanted = Excluded.rows([np.flatnonzero(random.random(items) < 0.2) for _ in range(users)])
    scores = (hidden @ vectors.T).numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_items, "USERS_AT_ONCE", 2)
        patch.setattr(top_items, "SLICE", 40)
        whole = best_rows(vectors, hidden, unwanted, items)[0]
        for user, row in enumerate(whole):
            free = np.setdiff1d(np.arange(items), unwanted.user(user))
            assert row[: len(free)].tolist() == sorted(free, key=lambda item: (-scores[user, item], item))
        for k in {k for k in (1, 2, items // 2, items - 1) if 0 < k < items}:
            assert (best_rows(vectors, hidden, unwanted, k)[0] == whole[:, :k]).all()


def test_a_mask_leaves_out_what_it_hides() -> None:
    scores = torch.tensor([[9.0, 1.0, 3.0, 2.0, torch.nan], [9.0, -torch.inf, 1.0, 1.0, 5.0]])
    mask = torch.tensor([[False, True, True, True, True], [False, True, True, False, False]])
    assert top_k(scores, mask, 4).tolist() == [[2, 3, 1, 0], [2, 0, 0, 0]]


def test_most_popular_in_the_order_of_the_catalogue() -> None:
    counts = np.array([0, 5, 7, 5, 0, 7])
    rows, scores = most_popular(
        counts, Excluded.rows([np.array([2]), np.array([], np.int64)]), np.array([1, 2, 3, 4]), 3
    )
    assert rows.tolist() == [[1, 3, 4], [2, 1, 3]]
    np.testing.assert_allclose(scores[1], np.log1p([7, 5, 5]) - np.log1p(24), rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.integers(0, 99),
)
def test_mmr_is_its_definition(users: int, candidates: int, k: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    vectors = torch.from_numpy(random.standard_normal((40, 3))).float()
    rows = np.stack([random.permutation(39)[:candidates] + 1 for _ in range(users)])
    scores = -np.sort(-random.standard_normal((users, candidates)), 1).astype(np.float32)
    some = random.integers(0, candidates + 1, users)
    rows[np.arange(candidates) >= some[:, None]], scores[np.arange(candidates) >= some[:, None]] = 0, -np.inf
    found, kept = rerank(vectors, rows, scores, share, k, users=2)
    units = torch.nn.functional.normalize(vectors, dim=1).numpy()
    for user, count in enumerate(some):
        chosen = by_hand(units[rows[user, :count]], scores[user, :count], share, k) if count else []
        expected = rows[user, chosen].tolist() if chosen else []
        assert found[user][found[user] > 0].tolist() == expected
        assert kept[user][found[user] > 0].tolist() == scores[user, chosen].tolist() if chosen else True
        if share == 0.0:
            assert expected == rows[user, : min(k, count)].tolist()
