"""Filters and neighbours: allowed items, features, exclusions, similar items, and lists that are less alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend import Recommender
from prism.recommend.events import Catalogue, Feature
from prism.recommend.filters import Excluded, has_value
from tests.recommend.test_recommender import ITEMS, NAMES, recommender

GENRES = ["Drama", "Comedy", "Drama", "Horror", *["Drama", "Comedy"] * 4]
YEARS = [1990 + place % 3 for place in range(ITEMS)]


def with_features() -> Recommender:
    it = recommender()
    features = {}
    for name, values in {"genre": GENRES, "year": YEARS}.items():
        known = sorted(set(values), key=str)
        features[name] = Feature([None, *known], np.array([0, *(known.index(value) + 1 for value in values)]))
    return Recommender(it.model, Catalogue(NAMES, features), it.users, it.histories)


def having(**wanted: Any) -> set[str]:
    columns = {"genre": GENRES, "year": YEARS}
    return {
        item
        for place, item in enumerate(NAMES)
        if all(columns[name][place] in values for name, values in wanted.items())
    }


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"genre": "Drama"}, having(genre=["Drama"])),
        ({"genre": ["Drama", "Horror"]}, having(genre=["Drama", "Horror"])),
        ({"genre": "Drama", "year": 1991}, having(genre=["Drama"], year=[1991])),
        ({"year": "1991"}, having(year=[1991])),
    ],
)
def test_items_with_features(where: dict[str, Any], expected: set[str]) -> None:
    it = with_features()
    everything = it.recommend(sequences=[["i12"]], k=ITEMS, filter_seen=False)
    found = it.recommend(sequences=[["i12"]], k=ITEMS, filter_seen=False, where=where)
    assert found.items[0] == [item for item in everything.items[0] if item in expected]
    scores = dict(everything[0])
    assert [score for _, score in found[0]] == pytest.approx([scores[item] for item in found.items[0]])
    popular = it.recommend(["bob"], k=ITEMS, where=where).items[0]
    assert popular == [item for item in NAMES if item in expected]
    assert set(it.similar_items("i12", ITEMS, where=where).items[0]) == expected - {"i12"}


def test_allowed_items_for_everyone() -> None:
    it = with_features()
    allowed = ["i2", "i12", "i5", "never sold"]
    found = it.recommend(["ann", "bob", "eve"], k=ITEMS, allowed=allowed)
    assert [sorted(items) for items in found.items] == [["i12", "i5"], ["i12", "i2", "i5"], ["i12", "i2"]]
    both = it.recommend(["bob"], k=ITEMS, allowed=allowed, where={"genre": "Comedy"}, exclude=[["i12"]])
    assert both.items == [["i2"]]
    assert it.recommend(["bob"], allowed=np.array(allowed)).items == it.recommend(["bob"], allowed=allowed).items
    with pytest.raises(ValueError, match="no item is left"):
        it.recommend(["bob"], allowed=["i1"], where={"genre": "Comedy"})
    with pytest.raises(ValueError, match=r"no feature 'gener' \(did you mean 'genre'\?\): the items have genre, year"):
        it.recommend(["bob"], where={"gener": "Drama"})
    with pytest.raises(
        ValueError, match=r"no item has the genre 'drama' \(did you mean 'Drama'\?\): values are such as"
    ):
        it.recommend(["bob"], where={"genre": "drama"})


def test_a_feature_with_lists_has_each_of_its_values() -> None:
    feature = Feature([None, "a", "b"], np.array([[0, 0], [1, 2], [2, 0], [0, 0]]))
    assert has_value(feature, [2]).tolist() == [False, True, True, False]
    assert has_value(feature, [1]).tolist() == [False, True, False, False]


def test_similar_items_are_those_with_the_largest_cosine() -> None:
    it = with_features()
    vectors = torch.nn.functional.normalize(it.model.item_vectors().detach(), dim=1)
    cosines = (vectors @ vectors.T).numpy()
    found = it.similar_items(["i3", "i7"], k=4)
    for row, item in enumerate((3, 7)):
        others = sorted((other for other in range(1, ITEMS + 1) if other != item), key=lambda o: -cosines[item, o])
        assert found.items[row] == [NAMES[other - 1] for other in others[:4]]
        np.testing.assert_allclose(found.scores[row], cosines[item, others[:4]], rtol=1e-5)
    assert it.similar_items("i3", 4).items[0] == found.items[0]
    assert len(it.similar_items("i3", k=99).items[0]) == ITEMS - 1
    frame = found.to_polars()
    assert frame.columns == ["item", "similar", "rank", "score", "fallback"]
    assert frame["item"].to_list() == ["i3"] * 4 + ["i7"] * 4


def test_a_diverse_list_is_less_alike_and_keeps_its_filters() -> None:
    it = with_features()
    vectors = torch.nn.functional.normalize(it.model.item_vectors().detach(), dim=1)

    def alike(rows: np.ndarray) -> float:
        chosen = vectors[torch.from_numpy(rows)]
        return float((chosen @ chosen.T).sum() - len(rows))

    plain, mixed = (it.recommend(["ann", "eve"], k=4, diversify=share) for share in (0.0, 0.7))
    assert sum(map(alike, mixed.rows)) < sum(map(alike, plain.rows))
    assert [row[0] for row in mixed.items] == [row[0] for row in plain.items], "the first is the best"
    found = it.recommend(["ann"], k=3, diversify=0.7, where={"genre": "Drama"}).items[0]
    assert set(found) <= having(genre=["Drama"]) - {"i1", "i2", "i3", "i4"}
    few = it.recommend(["ann"], k=5, diversify=0.7, allowed=["i9", "i10"])
    assert sorted(few.items[0]) == ["i10", "i9"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=6), st.integers(0, 99))
def test_pairs_hold_what_lists_do(rows: list[list[int]], seed: int) -> None:
    """Joining, choosing users and renumbering items, against lists."""
    random = np.random.default_rng(seed)
    first = Excluded.rows([np.array(row, np.int64) for row in rows])
    assert [first.user(user).tolist() for user in range(len(rows))] == rows
    other = [row[::-1] for row in reversed(rows)]
    joined = first | Excluded.rows([np.array(row, np.int64) for row in other])
    assert [sorted(joined.user(u)) for u in range(len(rows))] == [
        sorted(a + b) for a, b in zip(rows, other, strict=True)
    ]
    chosen = random.random(len(rows)) < 0.5
    some = first.of(chosen)
    assert [some.user(u).tolist() for u in range(some.users)] == [
        row for row, yes in zip(rows, chosen, strict=True) if yes
    ]
    choice = np.flatnonzero(random.random(10) < 0.6)
    if len(choice):
        kept = first.among(choice)
        for user, row in enumerate(rows):
            assert choice[kept.user(user)].tolist() == [item for item in row if item in choice]
    low, high = sorted(random.integers(0, len(rows) + 1, 2).tolist())
    part = first.part(low, high)
    assert [part.user(u).tolist() for u in range(high - low)] == rows[low:high]
