"""Frames out as they came in: library, column names and types of ids, also after saving and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from prism.cli import main
from prism.recommend import Recommender
from prism.recommend.events import Catalogue
from prism.recommend.frames import Source
from prism.recommend.results import Recommendations
from tests.recommend.test_recommender import NAMES, QUICK, recommender

USERS = {
    "number": [10 * n for n in range(8)],
    "text": [f"c{n}" for n in range(8)],
    "digits": [str(n) for n in range(8)],
}


def events(kind: str) -> dict[str, list[Any]]:
    """8 users with 6 events each; ids of users and items of a kind."""
    items = {"number": list(range(5, 15)), "text": [f"p{n}" for n in range(10)], "digits": [str(n) for n in range(10)]}
    rows = [(USERS[kind][u], items[kind][(u + 3 * t) % 10], t) for u in range(8) for t in range(6)]
    return {name: [row[place] for row in rows] for place, name in enumerate(("customer", "product", "when"))}


@pytest.mark.parametrize("kind", ["number", "text", "digits"])
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_come_out_as_they_came_in(
    library: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = (pd if library == "pandas" else pl).DataFrame(events(kind))
    quick = {**QUICK, "steps": 1}
    it = Recommender.fit(table, user="customer", item="product", time="when", **quick)
    it.save(tmp_path / "model")
    again = Recommender.load(tmp_path / "model", device="cpu")
    user = USERS[kind][3]
    for one in (it, again):
        found = one.recommend([user, USERS[kind][4]], k=3)
        frame = found.frame
        assert type(frame).__module__.partition(".")[0] == library
        assert list(frame.columns) == ["customer", "product", "rank", "score", "fallback"]
        assert list(frame["customer"]) == [user] * 3 + [USERS[kind][4]] * 3
        assert list(frame["product"]) == [item for row in found.items for item in row]
        assert set(frame["product"]) <= set(table["product"]) and {type(x) for x in found.items[0]} == {
            int if kind == "number" else str
        }
        assert list(frame["rank"]) == [1, 2, 3, 1, 2, 3]
        if library == "pandas":
            joined = frame.merge(table, on=["customer", "product"])  # fails for other types
            assert len(joined) == 0, "seen items are left out"
        assert list(one.known_users()) == USERS[kind]
        assert one.similar_items(found.items[0][0], 2).items[0][0] in set(table["product"])
    assert (
        main(["recommend", str(tmp_path / "model"), "--device", "cpu", "--json", "--users", str(user), "--k", "3"]) == 0
    )
    line = json.loads(capsys.readouterr().out)
    assert line["user"] == user and line["items"] == again.recommend([user], k=3).items[0]


def test_ids_with_square_brackets_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["Heat [/x]", "Matrix [dvd]", "a:apple:", *NAMES[3:]]
    Recommender(recommender().model, Catalogue(names)).save(tmp_path / "model")
    words = ["recommend", str(tmp_path / "model"), "--device", "cpu", "--k", "12"]
    for more in ([], ["--similar-to", "Heat [/x]"]):
        assert main([*words, *more]) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in names), printed


def test_a_file_of_allowed_items_may_begin_with_a_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Notepad and Excel write one before UTF-8."""
    recommender().save(tmp_path / "model")
    (tmp_path / "allowed.txt").write_bytes("\ufeffi3\r\n\r\ni4\r\n".encode())
    words = ["recommend", str(tmp_path / "model"), "--device", "cpu", "--json"]
    assert main([*words, "--allowed-file", str(tmp_path / "allowed.txt")]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["items"]) == ["i3", "i4"]


def test_both_libraries_on_request_and_types_that_join() -> None:
    it = recommender()
    with pytest.warns(UserWarning, match="unknown"):
        found = it.recommend(["eve", "dan", "ann"], k=2)
    for frame in (found.to_pandas(), found.to_polars()):
        assert list(frame["user"]) == ["eve", "eve", "dan", "dan", "ann", "ann"]
        assert list(frame["fallback"]) == [False, False, True, True, False, False]
        np.testing.assert_allclose(np.array(frame["score"]), found.scores.ravel(), rtol=1e-6)
    assert isinstance(found.frame, pl.DataFrame), "no DataFrame came in"
    few = it.recommend(["ann"], k=5, allowed=["i7", "i8"]).to_pandas()
    assert sorted(few["item"]) == ["i7", "i8"], "no rows where no item is left"
    by_place = it.recommend(sequences=[["i1"], ["i2"]], k=1).to_polars()
    assert by_place["user"].to_list() == [0, 1]


def test_columns_that_are_called_rank_and_ids_of_two_types() -> None:
    it = recommender()
    source = Source("rank", "score", "pandas")
    rows, scores = np.array([[1, 2], [3, 0]]), np.array([[0.5, 0.25], [1.0, -np.inf]], dtype=np.float32)
    found = Recommendations(rows, scores, it.catalogue, [7, "x"], np.array([False, True]), source)
    frame = found.to_pandas()
    assert list(frame.columns) == ["rank", "score", "rank_", "score_", "fallback"]
    assert list(frame["rank"]) == ["7", "7", "x"] and list(frame["score"]) == [NAMES[0], NAMES[1], NAMES[2]]
    assert found.to_polars()["rank"].to_list() == ["7", "7", "x"]


def test_parquet_files_keep_the_type_of_ids_and_csv_the_names_that_were_given(tmp_path: Path) -> None:
    quick = {**QUICK, "steps": 1, "data": {"length": 10, "cache": str(tmp_path / "cache")}}
    columns = {"user": "customer", "item": "product", "time": "when"}
    pl.DataFrame(events("digits")).write_parquet(tmp_path / "events.parquet")
    it = Recommender.fit(tmp_path / "events.parquet", **columns, **quick)
    assert it.recommend(["3"], k=1).to_polars()["customer"].to_list() == ["3"]
    pl.DataFrame(events("number")).write_csv(tmp_path / "events.csv")
    it = Recommender.fit(tmp_path / "events.csv", **columns, **quick)
    found = it.recommend([30], k=1).to_polars()
    assert found.columns[:2] == ["customer", "product"] and found["customer"].to_list() == [30]
