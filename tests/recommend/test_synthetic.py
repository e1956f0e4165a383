"""The made-up log is what its description says, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism.data.interactions import LogRecipe, prepare_log
from prism.data.interactions.prepared import Synthetic
from prism.data.interactions.synthetic import synthetic_log


def test_sizes_and_seeds() -> None:
    log = synthetic_log(users=50, items=200, events=2000, seed=3)
    assert (len(log.histories), len(log.users), len(log.histories.items)) == (50, 50, 2000)
    assert log.histories.lengths.min() >= 5
    assert log.histories.lengths.max() > 3 * np.median(log.histories.lengths)
    assert np.unique(log.histories.items).tolist() == list(range(1, log.num_items + 1))
    again, other = synthetic_log(50, 200, 2000, seed=3), synthetic_log(50, 200, 2000, seed=4)
    assert log.digest == again.digest != other.digest


def test_times_ascend_within_a_user_and_overlap_between_users() -> None:
    histories = synthetic_log(users=40, items=200, events=4000).histories
    assert histories.times is not None
    spans = [histories.user(u)[1] for u in range(40)]
    assert all((np.diff(times) >= 0).all() for times in spans)  # type: ignore[arg-type]
    starts = [times[0] for times in spans]  # type: ignore[index]
    assert max(starts) < max(times[-1] for times in spans)  # type: ignore[index]
    assert min(starts) < np.median(starts)


def test_users_return_to_where_they_left_a_series() -> None:
    """With probability `follow` (and by chance now and then) an item is the one after the series' last."""
    follow, size = 0.8, 20
    log = synthetic_log(users=100, items=400, events=10_000, follow=follow, drift=0.0)
    series = log.catalogue.features["series"]
    returns = hits = 0
    visited = []
    for user in range(100):
        names = log.catalogue.names(log.histories.user(user)[0])
        last: dict[str, int] = {}
        for name in names:
            where, episode = str(name).split("-")
            if where in last:
                returns += 1
                hits += int(episode) - 1 == last[where] % size
            last[where] = int(episode)
        visited.append(len(last))
    assert hits / returns == pytest.approx(follow + (1 - follow) / size, abs=0.02)
    assert max(visited) == 4, "without drift a user follows four series"
    assert all(
        series.values[v] == str(n).split("-")[0] for v, n in zip(series.of_item[1:], log.catalogue.items, strict=True)
    )


def test_drift_changes_interests_and_popularity_is_unequal() -> None:
    log = synthetic_log(users=100, items=400, events=20_000, drift=0.1)
    series = log.catalogue.features["series"].of_item
    assert np.mean([len(np.unique(series[log.histories.user(u)[0]])) for u in range(100)]) > 6
    counts = np.sort(log.histories.counts(log.num_items)[1:])
    assert counts[-len(counts) // 10 :].sum() > 0.2 * counts.sum()


def test_it_is_prepared_where_no_source_is_given(tmp_path: Path) -> None:
    sizes = Synthetic(users=20, items=120, events=400, seed=1)
    prepared = prepare_log(LogRecipe(synthetic=sizes), tmp_path)
    assert prepared.digest == synthetic_log(20, 120, 400, 1).digest
    assert prepared.manifest["counts"]["events"] == 400


@pytest.mark.parametrize(
    ("arguments", "sentence"), [({"users": 10, "events": 40}, "at least 5 for each"), ({"items": 80}, "more than 4")]
)
def test_sizes_that_do_not_work(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        synthetic_log(**arguments)
