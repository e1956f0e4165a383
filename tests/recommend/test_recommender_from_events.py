"""From tables of events to a recommender, and recommendations on the command line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pytest

from prism.cli import main
from prism.recommend import Recommender
from tests.recommend.test_recommender import NAMES, QUICK, frame, recommender


def test_from_a_frame_to_recommendations(tmp_path: Path) -> None:
    table = frame()
    it = Recommender.fit(table, **QUICK)
    history = table.filter(table["user"] == "u7").sort("time")["item"].to_list()
    assert it.recommend(["u7"]).items == it.recommend(sequences=[history]).items
    it.save(tmp_path / "model")
    assert Recommender.load(tmp_path / "model", device="cpu").recommend(["u7"]).items == it.recommend(["u7"]).items
    assert list(it.known_users()) == sorted(set(table["user"]))

    table.write_csv(tmp_path / "events.csv")
    quick = {**QUICK, "data": {"length": 10, "cache": str(tmp_path / "cache")}}
    same = Recommender.fit(tmp_path / "events.csv", out=tmp_path / "run", preset="sasrec", **quick)
    assert same.model.config.layers == "softmax"
    again = Recommender.load(tmp_path / "run", device="cpu")  # finds the training events by itself
    again.save(tmp_path / "moved")  # with the histories, although they have not been used yet
    (tmp_path / "events.csv").rename(tmp_path / "away.csv")
    moved = Recommender.load(tmp_path / "moved", device="cpu")
    (tmp_path / "away.csv").rename(tmp_path / "events.csv")
    assert moved.recommend(["u7"]).items == again.recommend(["u7"]).items == same.recommend(["u7"]).items
    other = Recommender.load(tmp_path / "run", data=tmp_path / "events.csv", device="cpu")
    assert other.recommend(["u7"]).items == same.recommend(["u7"]).items


@pytest.mark.parametrize("kind", ["polars", "pandas", "csv"])
def test_columns_are_named_as_on_the_command_line(tmp_path: Path, kind: str) -> None:
    names = {"user": "customer", "item": "product", "time": "when"}
    table = frame().rename(names)
    table.write_csv(tmp_path / "events.csv")
    events = {"polars": table, "pandas": pd.DataFrame(table.to_dict(as_series=False)), "csv": tmp_path / "events.csv"}[
        kind
    ]
    quick = {**QUICK, "data": {"length": 10, "cache": str(tmp_path / "cache")}}
    with pytest.raises(ValueError, match=r"usual name for the user.*customer, product, when.*user=\"NAME\" in Python"):
        Recommender.fit(events, **quick)
    by_name = Recommender.fit(events, **names, **quick)
    by_section = Recommender.fit(events, **{**quick, "data": {**quick["data"], **names}})
    plain = Recommender.fit(frame(), **QUICK)
    assert by_name.recommend(["u7"]).items == by_section.recommend(["u7"]).items == plain.recommend(["u7"]).items


def test_time_none_keeps_the_order_of_the_rows_and_features_are_columns() -> None:
    table = frame().reverse()
    it = Recommender.fit(table.with_columns(kind=table["item"].str.slice(0, 1)), time=None, features=["kind"], **QUICK)
    assert it.histories is not None and it.users is not None and it.histories.times is None
    rows = it.histories.user(int(it.users.index(["u7"])[0]))[0]
    assert it.catalogue.names(rows) == table.filter(table["user"] == "u7")["item"].to_list()
    assert list(it.catalogue.features) == ["kind"]


def test_a_column_named_in_two_places_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fit got both user='a' and data\['user'\]='b': give one of them"):
        Recommender.fit(frame(), user="a", data={"user": "b"})


def test_a_later_log_serves_everyone_in_it(tmp_path: Path) -> None:
    """Also users with fewer events than training wanted, and without the columns that describe items."""
    table = frame()
    table.with_columns(kind=table["item"].str.slice(0, 9)).write_csv(tmp_path / "events.csv")
    data = {"length": 10, "cache": str(tmp_path / "cache"), "features": ["kind"], "min_user": 3, "min_item": 2}
    it = Recommender.fit(tmp_path / "events.csv", out=tmp_path / "run", **{**QUICK, "data": data})
    item = it.catalogue.items[3]
    pl.DataFrame({"user": ["new", "u1", "u1"], "item": [item, item, "?"], "time": [1, 1, 2]}).write_csv(
        tmp_path / "now.csv"
    )
    later = Recommender.load(tmp_path / "run", data=tmp_path / "now.csv", device="cpu")
    expected = it.recommend(sequences=[[item], [item]]).items
    assert later.recommend(["new", "u1"]).items == expected


@pytest.mark.parametrize("source", ["csv", "parts", "polars", "pandas"])
def test_events_to_find_users_in_may_be_few_and_a_frame(source: str, tmp_path: Path) -> None:
    """Nothing is learned from them: a user with one event is a user."""
    data = {"length": 10, "cache": str(tmp_path / "cache")}
    it = Recommender.fit(frame(), out=tmp_path / "run", **{**QUICK, "data": data})
    item = it.catalogue.items[3]
    table = pl.DataFrame({"user": ["solo", "duo"], "item": [item, it.catalogue.items[5]], "time": [1, 1]})
    given: Any = tmp_path / "now.csv"
    if source == "csv":
        table.write_csv(given)
    elif source == "parts":
        given = tmp_path / "now"
        given.mkdir()
        table.write_parquet(given / "part-0.parquet")
    else:
        given = table if source == "polars" else table.to_pandas()
    expected = it.recommend(sequences=[[item]]).items
    for _ in range(2):  # also when it is in the cache
        later = Recommender.load(tmp_path / "run", data=given, device="cpu")
        assert later.recommend(["solo"]).items == expected
    assert type(later.recommend(["solo"]).frame).__module__.startswith("pandas" if source == "pandas" else "polars")
    if source == "csv":  # prepared for users to be found in, it is no less refused for training
        for _ in range(2):
            with pytest.raises(ValueError, match="no user has 2 or more events"):
                Recommender.fit(given, **{**QUICK, "data": data})
    recommender().save(tmp_path / "untrained")
    there = pl.DataFrame({"user": ["solo"], "item": ["i3"], "time": [1]})
    other = Recommender.load(tmp_path / "untrained", data=there, device="cpu")
    assert other.recommend(["solo"]).items == recommender().recommend(sequences=[["i3"]]).items


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        recommender().save(tmp_path / "model")
        return tmp_path / "model"

    def answer(self, capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> list[dict[str, Any]]:
        assert main(["recommend", str(folder), "--device", "cpu", "--json", *flags]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def test_for_users_and_sequences(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        it = recommender()
        eve, ann = self.answer(capsys, folder, "--users", "eve", "ann", "--k", "3")
        assert [eve["user"], ann["user"]] == ["eve", "ann"]
        assert [eve["items"], ann["items"]] == it.recommend(["eve", "ann"], k=3).items
        (found,) = self.answer(
            capsys, folder, "--sequence", "i5", "i6", "--k", "3", "--no-filter-seen", "--exclude", "i6"
        )
        assert (
            found["items"] == it.recommend(sequences=[["i5", "i6"]], k=3, filter_seen=False, exclude=[["i6"]]).items[0]
        )
        assert len(found["scores"]) == 3
        assert self.answer(capsys, folder, "--k", "2")[0]["items"] == NAMES[:2]

    def test_states_continue(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first, second = str(tmp_path / "first.safetensors"), str(tmp_path / "second.safetensors")
        self.answer(capsys, folder, "--sequence", "i1", "i2", "--save-states", first)
        (found,) = self.answer(capsys, folder, "--states", first, "--sequence", "i3", "--save-states", second)
        it = recommender()
        states = it.observe(it.start(1), [["i1", "i2", "i3"]])
        assert found["items"] == it.recommend(states=states).items[0]
        assert not {"i1", "i2", "i3"} & set(found["items"])
        assert self.answer(capsys, folder, "--states", second)[0]["items"] == it.recommend(states=states).items[0]

    def test_several_histories_and_users_have_states(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        it = recommender()
        histories = [["i1", "i2"], ["i5"]]
        flags = ["--sequences", *histories[0], "--sequences", *histories[1]]
        found = self.answer(capsys, folder, *flags, "--k", "3")
        assert [line["items"] for line in found] == it.recommend(sequences=histories, k=3).items
        assert [(line["user"], line["fallback"]) for line in found] == [(0, False), (1, False)]
        for made in (flags, ["--users", "ann", "eve"], ["--all-users"]):
            first, second = str(tmp_path / "first.safetensors"), str(tmp_path / "second.safetensors")
            start = self.answer(capsys, folder, *made, "--save-states", first)
            who = {"--users": ["ann", "eve"], "--all-users": ["ann", "bob", "eve"]}.get(made[0], [0, 1])
            assert [line["user"] for line in start] == who
            again = self.answer(capsys, folder, "--states", first)
            assert [line["items"] for line in start] == [line["items"] for line in again]
            more = [word for _ in start for word in ("--sequences", "i9")]
            self.answer(capsys, folder, "--states", first, *more, "--save-states", second)
            assert all("i9" not in line["items"] for line in self.answer(capsys, folder, "--states", second))
        assert [line["user"] for line in self.answer(capsys, folder, "--all-users")] == ["ann", "bob", "eve"]

    def test_similar_items_filters_and_files(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        it = recommender()
        (found,) = self.answer(capsys, folder, "--similar-to", "i3", "--k", "4")
        assert found["item"] == "i3" and found["items"] == it.similar_items("i3", 4).items[0]
        (tmp_path / "stock.txt").write_text("i7\ni8\n\n")
        flags = ["--users", "ann", "--allowed", "i9", "--allowed-file", str(tmp_path / "stock.txt")]
        (found,) = self.answer(capsys, folder, *flags)
        assert sorted(found["items"]) == ["i7", "i8", "i9"]
        (found,) = self.answer(capsys, folder, "--users", "ann", "--diversify", "0.5", "--k", "3")
        assert found["items"] == it.recommend(["ann"], 3, diversify=0.5).items[0]
        expected = it.recommend(["eve", "ann"], 3).to_polars()
        for ending, read in ((".csv", pl.read_csv), (".parquet", pl.read_parquet)):
            path = tmp_path / f"lists{ending}"
            words = ["--users", "eve", "ann", "--k", "3", "--output", str(path)]
            assert main(["recommend", str(folder), "--device", "cpu", *words]) == 0
            assert read(path).drop("score").equals(expected.drop("score"))
        path = tmp_path / "lists.jsonl"
        assert main(["recommend", str(folder), "--device", "cpu", "--users", "eve", "--output", str(path)]) == 0
        assert json.loads(path.read_text())["user"] == "eve"

    def test_an_unknown_user_is_said(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["recommend", str(folder), "--device", "cpu", "--json", "--users", "dan", "ann"]) == 0
        shown = capsys.readouterr()
        dan, ann = (json.loads(line) for line in shown.out.splitlines())
        assert (dan["fallback"], ann["fallback"]) == (True, False) and dan["items"] == NAMES[:10]
        assert "1 of 2 users are unknown and get the most popular items: 'dan'" in shown.err

    def test_a_table_and_a_warning(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert main(["recommend", str(folder), "--device", "cpu", "--sequence", "i1", "new", "--k", "2"]) == 0
        shown = capsys.readouterr()
        for item in recommender().recommend(sequences=[["i1"]], k=2).items[0]:
            assert item in shown.out
        assert shown.err == "1 of 2 events are dropped: the model does not know 'new'\n"

    def test_bad_input_is_named(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        it = recommender()
        it.start(2).save(tmp_path / "two.safetensors")
        for flags, words in (
            (["--users", "ann", "--sequence", "i1"], "--users cannot be used with --sequence"),
            (["--all-users", "--states", "x.safetensors"], "--all-users cannot be used with --sequences"),
            (["--users", "ann", "--all-users"], "give one of them"),
            (["--users", "ann", "--similar-to", "i1"], "--similar-to finds items for items"),
            (["--users", "dan", "--save-states", str(tmp_path / "s.safetensors")], "users are unknown: 'dan'"),
            (["--sequence", "i1", "--times", "1", "--times", "2"], "once for each of the 1 --sequences, got 2"),
            (["--where", "kind"], "--where takes name=value"),
            (["--where", "kind=a", "--where", "kind=b"], "--where is given twice"),
            (["--where", "kind=a"], "where has no feature 'kind'"),
            (["--allowed-file", str(tmp_path / "none.txt")], "none.txt"),
            (["--output", str(tmp_path / "x.xls")], "output must end in .csv, .parquet, .jsonl"),
            (["--sequence", "i1", "--save-states", "states.bin"], "ends in .safetensors"),
            (["--states", str(tmp_path / "two.safetensors"), "--sequence", "i1"], "holds 2 users"),
            (["--states", str(tmp_path / "none.safetensors")], "there is no state file"),
            (["--states", str(tmp_path / "two.safetensors"), "--max-length", "3"], "has read all events"),
        ):
            assert main(["recommend", str(folder), "--device", "cpu", *flags]) == 2
            assert words in capsys.readouterr().err
        assert main(["recommend", str(tmp_path / "nothing")]) == 2
