"""Features of items and users: lists, vectors and tables, from frames and files, equal to a slow reading of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prism.recommend.events import EventRecipe, open_dataset, prepare_dataset
from prism.recommend.events.features import Tables
from prism.recommend.events.recipe import make_dataset

EVENTS = pl.DataFrame({"user": [1, 1, 1, 2, 2], "item": ["a", "b", "c", "a", "c"]})
WORDS = st.lists(st.sampled_from(["x", "y", "z", ""]), max_size=4)


def dataset(events: Any = EVENTS, tables: Tables | None = None, **recipe: Any) -> Any:
    return make_dataset(EventRecipe(**{"time": None, **recipe}), events, tables)


def lists(feature: Any, rows: int) -> list[list[Any]]:
    return [feature.values_of(row) for row in range(rows)]


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, min_size=3, max_size=3), st.booleans())
def test_lists_are_the_distinct_values_of_an_item_in_order(words: list[list[str]], as_text: bool) -> None:
    column = ["|".join(each) for each in words] if as_text else words
    table = pl.DataFrame(
        {"item": ["c", "a", "b"], "tags": pl.Series(column, dtype=None if as_text else pl.List(pl.String))}
    )
    made = dataset(features=("tags",), tables=Tables(items=table), list_separator="|")
    expected = {item: [w for w in dict.fromkeys(each) if w] for item, each in zip(["c", "a", "b"], words, strict=True)}
    found = lists(made.catalogue.features["tags"], 4)
    assert found == [[], expected["a"], expected["b"], expected["c"]]


def test_a_text_without_a_separator_is_one_value() -> None:
    table = pd.DataFrame({"item": ["a", "b", "c"], "tags": ["x|y", "y", None]})
    feature = dataset(features=("tags",), tables=Tables(items=table)).catalogue.features["tags"]
    assert not feature.is_list and [feature.values[code] for code in feature.of_item] == [None, "x|y", "y", None]


def test_tables_may_be_files_and_have_other_rows(tmp_path: Path) -> None:
    EVENTS.write_csv(tmp_path / "events.csv")
    pl.DataFrame({"item": ["z", "b", "a"], "kind": ["k", "l", "l"], "g": ["", "u|v", "v"]}).write_csv(
        tmp_path / "i.csv"
    )
    pl.DataFrame({"user": [2, 3], "land": ["fr", "de"], "langs": [["f", "e"], ["d"]]}).write_parquet(
        tmp_path / "u.parquet"
    )
    recipe = EventRecipe(
        str(tmp_path / "events.csv"),
        time=None,
        features=("kind", "g"),
        user_features=("land", "langs"),
        items=str(tmp_path / "i.csv"),
        users=str(tmp_path / "u.parquet"),
        list_separator="|",
    )
    made = prepare_dataset(recipe, tmp_path / "cache")
    again = prepare_dataset(recipe, tmp_path / "cache")
    assert again.folder == made.folder and again.digest == made.digest
    assert lists(made.catalogue.features["kind"], 4) == [[], ["l"], ["l"], []]
    assert lists(made.catalogue.features["g"], 4) == [[], ["v"], ["u", "v"], []]
    assert lists(made.users.features["land"], 2) == [[], ["fr"]]
    assert lists(again.users.features["langs"], 2) == [[], ["f", "e"]]
    assert again.histories.profiles.shape == (2, 3) and not again.histories.profiles[0].any()
    assert any("1 of 3 items are not in" in note for note in made.manifest["notes"])
    pl.DataFrame({"item": ["a"], "kind": ["new"], "g": ["v"]}).write_csv(tmp_path / "i.csv")
    assert prepare_dataset(recipe, tmp_path / "cache").folder != made.folder, "a changed table is read again"


def test_vectors_as_mapping_frame_array_and_files(tmp_path: Path) -> None:
    vectors = {"c": [1.0, 2.0], "a": [3.0, 4.0]}
    expected = np.array([[0, 0], [3, 4], [0, 0], [1, 2]], dtype=np.float32)
    frame = pd.DataFrame({"item": list(vectors), "v": list(vectors.values())})
    items, array = pl.DataFrame({"item": list(vectors)}), np.array(list(vectors.values()), dtype=np.float32)
    np.save(tmp_path / "v.npy", array)
    save_file({"v": array}, tmp_path / "v.safetensors")
    pl.DataFrame(frame.to_dict("list")).write_parquet(tmp_path / "v.parquet")
    given_as = [vectors, frame, array, tmp_path / "v.npy", tmp_path / "v.safetensors", str(tmp_path / "v.parquet")]
    for given_vectors in given_as:
        made = dataset(tables=Tables(items=items, item_vectors=given_vectors))
        (found,) = made.catalogue.vectors.values()
        np.testing.assert_array_equal(found, expected)
    column = dataset(features=("v",), tables=Tables(items=frame)).catalogue
    np.testing.assert_array_equal(column.vectors["v"], expected)
    saved = made.save(tmp_path / "saved")
    opened = open_dataset(tmp_path / "saved")
    np.testing.assert_array_equal(opened.catalogue.vectors["v"], expected)
    assert opened.digest == saved.digest == dataset(tables=Tables(item_vectors=frame)).digest
    save_file({"v": array[:0]}, tmp_path / "saved" / "vectors.safetensors")
    with pytest.raises(ValueError, match=r"vectors.*\[4, V\]|damaged"):
        open_dataset(tmp_path / "saved")


@pytest.mark.parametrize(
    ("tables", "recipe", "message"),
    [
        (Tables(item_vectors=np.zeros((3, 2))), {}, "does not say whose vectors"),
        (Tables(pl.DataFrame({"item": ["a"]}), item_vectors=np.zeros((3, 2))), {}, "3 rows, but the table items has 1"),
        (Tables(item_vectors={"a": [1.0], "b": [1.0, 2.0]}), {}, "must have one length, they have 1, 2"),
        (Tables(item_vectors={"zz": [1.0]}), {}, "no vector of an item in the events: give it the ids they have"),
        (Tables(item_vectors={"a": [np.inf]}), {}, "hold missing, infinite or NaN"),
        (Tables(item_vectors=pl.DataFrame({"item": ["a"]})), {}, "and one column of vectors"),
        (Tables(item_vectors="gone.npy"), {}, "no file gone.npy"),
        (Tables(pl.DataFrame({"item": ["a"]})), {"features": ("kind",)}, r"no column 'kind' \(features\)"),
        (Tables(pl.DataFrame({"x": ["a"], "kind": [1]})), {"features": ("kind",)}, "usual name for the item"),
        (Tables(users=pl.DataFrame({"user": [1], "v": [[0.5]]})), {"user_features": ("v",)}, "which holds vectors"),
        (Tables(items=7), {"features": ("kind",)}, "items must be a path"),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(tables: Tables, recipe: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        dataset(tables=tables, **recipe)
