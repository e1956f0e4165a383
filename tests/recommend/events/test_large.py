"""A folder of parquet parts gives exactly the files that the same events give as one table."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend.events import EventRecipe, large, prepare_dataset
from prism.recommend.events.dataset import EVENTS, ITEMS, USERS
from prism.recommend.events.large import bucket_bounds
from prism.recommend.events.recipe import make_dataset

ROW = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4), st.sampled_from(["x", "y", "x|y", None]))


def write_parts(folder: Path, frame: pl.DataFrame, parts: int) -> None:
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(len(frame)), parts)):
        frame[rows.tolist()].write_parquet(folder / f"part-{number:03d}.parquet")


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(ROW, min_size=4, max_size=60),
    parts=st.integers(1, 4),
    batch=st.integers(3, 30),
    bucket=st.integers(1, 30),
    texts=st.booleans(),
    timed=st.booleans(),
    duplicates=st.sampled_from(["keep", "drop"]),
    least=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_parts_give_the_files_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    parts: int,
    batch: int,
    bucket: int,
    texts: bool,
    timed: bool,
    duplicates: str,
    least: tuple[int, int],
) -> None:
    root = tmp_path_factory.mktemp("log")
    frame = pl.DataFrame(rows, schema=["user", "item", "time", "kind"], orient="row").cast({"kind": pl.String})
    if texts:
        frame = frame.with_columns(user=pl.format("u{}", "user"), item=pl.col("item").cast(pl.String))
    write_parts(root / "log", frame, parts)
    recipe = EventRecipe(
        str(root / "log"),
        time="time" if timed else None,
        features=("kind",),
        list_separator="|",
        duplicates=duplicates,  # type: ignore[arg-type]
        min_user=least[0],
        min_item=least[1],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "BATCH", batch)
        patch.setattr(large, "BUCKET", bucket)
        try:
            expected = make_dataset(recipe, frame)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)[:20]):
                prepare_dataset(recipe, root / "cache")
            return
        made = prepare_dataset(recipe, root / "cache")
    assert made.folder is not None
    whole = expected.save(root / "whole")
    assert whole.folder is not None
    for name in (EVENTS, ITEMS, USERS):
        assert (made.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
    assert made.digest == whole.digest and made.manifest["counts"] == whole.manifest["counts"]
    assert not [path for path in made.folder.parent.iterdir() if "partial" in path.name]


def test_a_changed_part_is_read_again_and_bad_parts_are_named(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": [1, 1, 2, 2], "item": [1, 2, 1, 2]})
    write_parts(tmp_path / "log", frame, 2)
    recipe = EventRecipe(str(tmp_path / "log"))
    said: list[str] = []
    made = prepare_dataset(recipe, tmp_path / "cache", report=said.append)
    assert prepare_dataset(recipe, tmp_path / "cache").folder == made.folder and any(
        "4 events" in line for line in said
    )
    frame[:1].write_parquet(tmp_path / "log" / "part-002.parquet")
    assert len(prepare_dataset(recipe, tmp_path / "cache").histories.items) == 5
    pl.DataFrame({"user": [None], "item": [1]}, schema_overrides={"user": pl.Int64}).write_parquet(
        tmp_path / "log" / "part-003.parquet"
    )
    with pytest.raises(ValueError, match=r"'user' of .*log is missing"):
        prepare_dataset(recipe, tmp_path / "cache")
    (tmp_path / "log" / "part-003.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot be read as parquet parts"):
        prepare_dataset(recipe, tmp_path / "cache")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 20))
def test_buckets_cover_all_users_and_are_small(counts: list[int], most: int) -> None:
    bounds = bucket_bounds(np.array(counts), most)
    assert bounds[0] == 0 and bounds[-1] == len(counts) and (np.diff(bounds) > 0).all()
    assert all(sum(counts[a:b]) <= most or b - a == 1 for a, b in pairwise(bounds.tolist()))
