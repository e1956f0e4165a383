"""Synthetic events follow their description and are the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism.recommend.events import EventRecipe, prepare_dataset
from prism.recommend.events.recipe import Synthetic
from prism.recommend.events.synthetic import synthetic_dataset


def test_sizes_and_seeds() -> None:
    dataset = synthetic_dataset(users=50, items=200, events=2000, seed=3)
    assert (len(dataset.histories), len(dataset.users), len(dataset.histories.items)) == (50, 50, 2000)
    assert dataset.histories.lengths.min() >= 5
    assert dataset.histories.lengths.max() > 3 * np.median(dataset.histories.lengths)
    assert np.unique(dataset.histories.items).tolist() == list(range(1, dataset.num_items + 1))
    again, other = synthetic_dataset(50, 200, 2000, seed=3), synthetic_dataset(50, 200, 2000, seed=4)
    assert dataset.digest == again.digest != other.digest


def test_times_ascend_within_a_user_and_overlap_between_users() -> None:
    histories = synthetic_dataset(users=40, items=200, events=4000).histories
    assert histories.times is not None
    spans = [histories.user(u)[1] for u in range(40)]
    assert all((np.diff(times) >= 0).all() for times in spans)
    starts = [times[0] for times in spans]
    assert max(starts) < max(times[-1] for times in spans)
    assert min(starts) < np.median(starts)


def test_users_return_to_where_they_left_a_series() -> None:
    """With probability `follow` (and by chance now and then) an item is the next free one after the series' last."""
    follow, size = 0.8, 20
    dataset = synthetic_dataset(users=100, items=400, events=3_000, follow=follow, drift=0.0)
    series = dataset.catalogue.features["series"]
    returns = hits = by_chance = 0
    for user in range(100):
        names = [str(name).split("-") for name in dataset.catalogue.names(dataset.histories.user(user)[0])]
        taken: dict[str, list[int]] = {}
        for where, episode in names:
            before = taken.setdefault(where, [])
            if before:
                free = [n for k in range(size) if (n := (before[-1] + k) % size + 1) not in before]
                returns, hits, by_chance = returns + 1, hits + (int(episode) == free[0]), by_chance + 1 / len(free)
            before.append(int(episode))
    chance = by_chance / returns
    assert hits / returns == pytest.approx(follow + (1 - follow) * chance, abs=0.025)
    assert all(
        series.values[v] == str(n).split("-")[0]
        for v, n in zip(series.of_item[1:], dataset.catalogue.items, strict=True)
    )


def test_no_item_is_taken_twice_and_finished_series_are_left() -> None:
    dataset = synthetic_dataset(users=20, items=120, events=1200, drift=0.0)
    assert dataset.histories.lengths.max() == 60, "half of the items"
    for user in range(20):
        items, _ = dataset.histories.user(user)
        assert len(np.unique(items)) == len(items)
    series = dataset.catalogue.features["series"].of_item
    assert min(len(np.unique(series[dataset.histories.user(u)[0]])) for u in range(20)) >= 3


def test_drift_changes_interests_and_popularity_is_unequal() -> None:
    def series_of(drift: float) -> float:
        dataset = synthetic_dataset(users=100, items=400, events=4_000, drift=drift)
        series = dataset.catalogue.features["series"].of_item
        return float(np.mean([len(np.unique(series[dataset.histories.user(u)[0]])) for u in range(100)]))

    assert series_of(0.0) < 5 < 6 < series_of(0.1)
    dataset = synthetic_dataset(users=200, items=400, events=4_000)
    counts = np.sort(dataset.histories.counts(dataset.num_items)[1:])
    assert counts[-len(counts) // 10 :].sum() > 0.2 * counts.sum()


def test_it_is_prepared_where_no_source_is_given(tmp_path: Path) -> None:
    sizes = Synthetic(users=20, items=120, events=400, seed=1)
    prepared = prepare_dataset(EventRecipe(synthetic=sizes), tmp_path)
    assert prepared.digest == synthetic_dataset(20, 120, 400, 1).digest
    assert prepared.manifest["counts"]["events"] == 400


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"users": 10, "events": 40}, "at least 5 for each"),
        ({"users": 10, "events": 2001}, "at most 200"),
        ({"items": 80}, "more than 4"),
    ],
)
def test_sizes_that_do_not_work(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        synthetic_dataset(**arguments)
