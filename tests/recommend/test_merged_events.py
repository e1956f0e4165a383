"""A recommender's log grows: two logs become one, and ids and times of new events that do not fit are refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend import Recommender
from prism.recommend.events import Catalogue, Dataset, Feature
from prism.recommend.events.merge import merge, merge_catalogues
from prism.recommend.events.recipe import EventRecipe, make_dataset
from tests.recommend.test_update import QUICK, clustered

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 5)), min_size=2, max_size=25)


def _dataset(rows: list[tuple[int, int, int]], timed: bool) -> Dataset:
    frame = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    return make_dataset(EventRecipe(time="time" if timed else None), frame, any_length=True)


def _as_dict(dataset: Dataset) -> dict[Any, list[Any]]:
    return {
        user: [dataset.catalogue.items[i - 1] for i in dataset.histories.user(row)[0]]
        for row, user in enumerate(dataset.users.users)
    }


@settings(max_examples=60, deadline=None)
@given(EVENTS, EVENTS, st.booleans(), st.booleans())
def test_a_merged_log_is_both_logs_in_order(old_rows: Any, new_rows: Any, timed: bool, drop: bool) -> None:
    old, new = _dataset(old_rows, timed), _dataset(new_rows, timed)
    merged, first_new = merge(old, new, drop)
    assert list(merged.catalogue.items[: len(old.catalogue)]) == list(old.catalogue.items)
    assert list(merged.users.users[: len(old.users)]) == list(old.users.users)
    known = {row if timed else row[:2] for row in old_rows}
    kept = [row for row in new_rows if not drop or (row if timed else row[:2]) not in known]
    expected, firsts = {}, {}
    for user in merged.users.users:
        mine = [(row, False) for row in old_rows if row[0] == user] + [(row, True) for row in kept if row[0] == user]
        if timed:
            mine.sort(key=lambda pair: (pair[0][2], pair[1]))
        expected[user] = [row[1] for row, _ in mine]
        firsts[user] = next((place for place, (_, is_new) in enumerate(mine) if is_new), len(mine))
    assert _as_dict(merged) == expected
    assert first_new.tolist() == [firsts[user] for user in merged.users.users]


def test_new_values_come_after_the_old_ones() -> None:
    old = Catalogue(
        ["a", "b"], {"tags": Feature([None, "x"], np.array([[0], [1], [0]]))}, {"v": np.ones((3, 2), np.float32)}
    )
    new = Catalogue(["b", "c"], {"tags": Feature([None, "w", "x"], np.array([[0, 0], [1, 0], [2, 1]]))})
    both = merge_catalogues(old, new)
    tags = both.features["tags"]
    assert [tags.values_of(row) for row in range(4)] == [[], ["x"], [], ["x", "w"]] and tags.values == [None, "x", "w"]
    assert both.vectors["v"].tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    with pytest.raises(ValueError, match="the item 'b', but the items of training are integers"):
        merge_catalogues(Catalogue([1, 2]), new)


def digits(events: int = 600) -> pl.DataFrame:
    """Events whose ids are text, all of it integers."""
    random = np.random.default_rng(3)
    ids = {name: [str(i) for i in random.integers(0, many, events)] for name, many in (("user", 30), ("item", 15))}
    return pl.DataFrame({**ids, "time": range(events)}).with_columns(kind=pl.col("item").str.slice(-1))


def more(*rows: tuple[str, str]) -> pl.DataFrame:
    """Later events of users and items."""
    table = pl.DataFrame(rows, schema=["user", "item"], orient="row")
    return table.with_columns(time=pl.int_range(pl.len()) + 9000, kind=pl.lit("1"))


@pytest.mark.parametrize("source", ["frame", "file"])
def test_ids_of_digits_are_joined_by_ids_of_letters(source: str, tmp_path: Path) -> None:
    """Text that is all integers is kept as integers, but is no less text than "A12"; and "007" is not 7."""
    new: Any = more(("1", "A12"), ("bob", "3"), ("1", "007"), ("bob", "A12"), ("1", "5"))
    old: Any = digits()
    if source == "file":
        old.write_csv(tmp_path / "old.csv"), new.write_csv(tmp_path / "new.csv")
        old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    data = {"length": 12, "cache": str(tmp_path / "cache")}
    first = Recommender.fit(old, steps=2, features=["kind"], **{**QUICK, "data": data})
    with pytest.warns(UserWarning, match="1 of 2 users are unknown.*'007'"):
        assert first.recommend(users=["7", "007"]).fallback.tolist() == [False, True]
    second = first.update(new, tmp_path / "run", steps=2)
    assert second.catalogue.items == [*map(str, first.catalogue.items), "007", "A12"]
    assert second.users is not None and second.histories is not None and first.users is not None
    assert second.users.users == [*map(str, first.users.users), "bob"]
    for recommender in (second, Recommender.load(tmp_path / "run", device="cpu")):
        histories = recommender._histories(["1", "bob"], "error")[1]
        last, bob = (recommender.catalogue.names(histories.user(row)[0]) for row in (0, 1))
        assert last[-3:] == ["A12", "007", "5"] and bob == ["3", "A12"]
    table = {"item": ["A13", "008", "8"], "kind": ["1", "2", "3"]}
    grown = first.add_items(table)
    assert grown.catalogue.items == [*map(str, first.catalogue.items), "A13", "008"]
    assert grown.recommend(users=[1], k=99, filter_seen=False).items[0].count("8") == 1
    assert grown.update(new, steps=1).catalogue.index(["A13", "7"]).tolist() == [16, 8]


def test_ids_that_are_numbers_are_not_joined_by_letters() -> None:
    numbers = digits().with_columns(pl.col("user").cast(pl.Int64), pl.col("item").cast(pl.Int64))
    first = Recommender.fit(numbers, steps=2, features=["kind"], **QUICK)
    with pytest.raises(ValueError, match="the item 'A12', but the items of training are integers: give the same ids"):
        first.update(more(("1", "A12"), ("1", "3")))
    with pytest.raises(ValueError, match="the item '007', but the items of training are integers"):
        first.add_items({"item": ["007"], "kind": ["1"]})


@pytest.mark.parametrize("kind", ["frame", "parts"])
def test_dates_and_numbers_are_not_mixed_by_an_update(kind: str, tmp_path: Path) -> None:
    numbers = clustered().drop("tags").with_columns(time=pl.col("time") * 1000 + 1_700_000_000_000)
    dates = numbers.with_columns(pl.from_epoch("time", "ms"))

    def given(table: pl.DataFrame) -> Any:
        if kind == "frame":
            return table
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        table.write_parquet(folder / "part-0.parquet")
        return folder

    data = {"length": 12, "cache": str(tmp_path / "cache")}
    first = Recommender.fit(given(numbers[:600]), steps=2, **{**QUICK, "data": data})
    with pytest.raises(ValueError, match="the new events are dates, those of training numbers: give numbers here too"):
        first.update(given(dates[600:]), steps=1)
    first.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="the new events are dates, those of training numbers"):
        Recommender.load(tmp_path / "saved", device="cpu").update(given(dates[700:]), steps=1)
    second = first.update(given(numbers[600:]), steps=1)
    with pytest.raises(ValueError, match="the new events are dates, those of training numbers"):
        second.update(given(dates[800:]), steps=1)
    again = Recommender.fit(given(dates[:600]), steps=2, **{**QUICK, "data": data})
    with pytest.raises(ValueError, match="the new events are numbers, those of training dates"):
        again.update(given(numbers[700:]), steps=1)


def test_new_events_before_all_old_ones_are_noted() -> None:
    old, new = _dataset([(0, 0, 5), (0, 1, 6)], True), _dataset([(0, 1, 2), (1, 1, 4)], True)
    assert any("all new events are earlier" in note for note in merge(old, new).dataset.manifest["notes"])
    assert not any("all new events are earlier" in note for note in merge(new, old).dataset.manifest["notes"])
