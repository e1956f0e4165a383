"""Coverage, novelty, diversity and serendipity are their definitions, computed list by list."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend import lists as lists_module
from prism.recommend.events import Histories
from prism.recommend.lists import TopKCounts, mean_cosine, serendipity
from prism.recommend.ranking import Ranking

ITEMS = 12


def events(random: np.random.Generator, users: int) -> Histories:
    lengths = random.integers(0, 6, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Histories(offsets, random.integers(1, ITEMS + 1, offsets[-1]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 9), st.integers(2, 5), st.sampled_from([5, 2**22]))
def test_diversity_is_the_mean_over_pairs(seed: int, users: int, k: int, at_once: int) -> None:
    random = np.random.default_rng(seed)
    train = events(random, users)
    chosen = np.stack([random.permutation(ITEMS)[:k] + 1 for _ in range(3)])
    had = np.zeros((ITEMS + 1, users))
    for user in range(users):
        had[train.user(user)[0], user] = 1

    def cosine(a: int, b: int) -> float:
        norms = np.linalg.norm(had[a]) * np.linalg.norm(had[b])
        return float(had[a] @ had[b] / norms) if norms else 0.0

    expected = [np.mean([cosine(a, b) for a, b in combinations(row, 2)]) for row in chosen.tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists_module, "_AT_ONCE", at_once)
        np.testing.assert_allclose(mean_cosine(chosen, train, ITEMS), expected, atol=1e-9)


def test_lists_of_a_batch() -> None:
    random = np.random.default_rng(0)
    scores = torch.from_numpy(random.standard_normal((30, ITEMS + 1)))
    mask = torch.ones(30, ITEMS + 1, dtype=torch.bool)
    mask[:, 0] = False
    found = TopKCounts(ITEMS, (1, 5))
    top = scores[:, 1:].topk(5).indices.numpy() + 1
    for part in (slice(0, 7), slice(7, 30)):
        found.add(scores[part].clone(), mask[part], np.arange(30)[part])
    popularity = np.arange(ITEMS + 1)
    shares = np.maximum(popularity, 1) / popularity[1:].sum()
    assert found.novelty(popularity)["novelty@5"] == pytest.approx(-np.log2(shares[top]).mean())
    assert found.coverage()["coverage@1"] == len(set(top[:, 0])) / ITEMS
    train = events(random, 40)
    assert found.diversity(train, ITEMS)["diversity@5"] == pytest.approx(1 - mean_cosine(top, train, ITEMS).mean())


def test_of_many_lists_some_are_kept_and_of_many_users_some_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "LISTS", 10)
    found = TopKCounts(ITEMS, (2,), targets=35)
    scores, mask = torch.rand(35, ITEMS + 1), torch.ones(35, ITEMS + 1, dtype=torch.bool)
    found.add(scores, mask, np.arange(35))
    assert sum(map(len, found._kept)) == 9, "every fourth"
    train = events(np.random.default_rng(1), 50)
    monkeypatch.setattr(lists_module, "USERS", 10)
    some = train.take(np.arange(0, 50, 5))
    chosen = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_allclose(mean_cosine(chosen, train, ITEMS), mean_cosine(chosen, some, ITEMS))


def test_serendipity_counts_hits_that_are_not_popular() -> None:
    popularity = np.array([0, 5, 9, 1, 7])  # by popularity: 2, 4, 1, 3
    ranking = Ranking(np.array([1, 1, 2, 3]), np.full(4, 4))
    found = serendipity(ranking, np.array([2, 3, 1, 3]), popularity, (1, 2, 3))
    assert found == {"serendipity@1": 0.25, "serendipity@2": 0.5, "serendipity@3": 0.5}
