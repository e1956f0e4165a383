"""Events of every file format become the same histories; bad input is refused in one sentence, and nothing is lost."""

from __future__ import annotations

import gzip
import lzma
import sys
import uuid
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend.events import (
    Catalogue,
    Dataset,
    EventRecipe,
    Feature,
    Samples,
    Users,
    leave_one_out,
    open_dataset,
    prepare_dataset,
)
from prism.recommend.events.columns import Columns
from prism.recommend.events.event_table import core_mask, k_core, read_events
from prism.recommend.events.features import Tables
from prism.recommend.events.recipe import make_dataset

ROWS = [("b", "x", 3), ("a", "y", 5), ("a", "x", 1), ("b", "z", 3), ("b", "x", 2), ("a", "z", 5)]
"""Unsorted, with ties in time."""
ORDERED = {"a": ["x", "y", "z"], "b": ["x", "x", "z"]}
BY_INPUT = {"a": ["y", "x", "z"], "b": ["x", "z", "x"]}


def histories(prepared: Dataset) -> dict[Any, list[Any]]:
    names = prepared.users.users
    return {names[u]: prepared.catalogue.names(prepared.histories.user(u)[0]) for u in range(len(prepared.histories))}


def table(separator: str = ",", names: str = "user,item,time", rows: list[Any] = ROWS) -> str:
    head = [names.replace(",", separator)] if names else []
    return "\n".join([*head, *(separator.join(map(str, row)) for row in rows)]) + "\n"


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
def test_a_pandas_frame_may_hold_anything_that_is_not_asked_for(unit: str) -> None:
    """Dates by the second, ids of a class of its own, and columns that polars cannot hold."""
    names = {name: uuid.uuid5(uuid.NAMESPACE_URL, name) for name in "xyz"}
    moments = np.array([1_700_000_000 + t for _, _, t in ROWS]).astype("datetime64[s]").astype(f"datetime64[{unit}]")
    events = pd.DataFrame(
        {
            "user": [user for user, _, _ in ROWS],
            "item": [names[item] for _, item, _ in ROWS],
            "time": moments,
            "phase": np.ones(len(ROWS), dtype=complex),
            "object": [object() for _ in ROWS],
        }
    )
    made = read_events(events).to_dataset()
    assert histories(made) == {user: [str(names[item]) for item in items] for user, items in ORDERED.items()}
    assert made.histories.times is not None and made.histories.times.min() == 1_700_000_001
    plain = pl.DataFrame(
        {"user": events["user"].to_list(), "item": pl.Series(events["item"].to_list(), dtype=pl.Object)}
    )
    assert len(read_events(plain).to_dataset().catalogue) == 3
    described = events.drop(columns="time").assign(time=range(6))
    table = pd.DataFrame({"item": list(names.values()), "kind": ["a", "b", "a"], "phase": np.ones(3, dtype=complex)})
    recipe = EventRecipe(features=("kind",))
    assert make_dataset(recipe, described, Tables(items=table)).catalogue.features["kind"].values == [None, "a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("events.csv", table(), Columns()),
        ("events.csv", table(names="userId,movieId,Timestamp"), Columns()),
        ("events.csv", table(names="who,what,when"), Columns("who", "what", "when")),
        ("events.csv", table(";"), Columns()),
        ("events.tsv", table("\t"), Columns()),
        ("events.dat", table("::", ""), Columns("0", "1", "2")),
        ("events.csv", table(names=""), Columns("0", "1", "2")),
        ("events.inter", table("\t", "user_id:token,item_id:token,timestamp:float"), Columns()),
        ("events.txt", table("\t"), Columns()),
        ("events", table("|"), Columns()),
        ("events.csv", "\ufeff" + table().replace("\n", "\r\n"), Columns()),
        ("rows.txt", table(" "), Columns()),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_separated_values(tmp_path: Path, name: str, content: str, columns: Columns, packed: str) -> None:
    path = tmp_path / (name + packed)
    pack = {"": lambda x: x, ".gz": gzip.compress, ".xz": lzma.compress}[packed]
    path.write_bytes(pack(content.encode()))
    format = "csv" if name == "rows.txt" else "auto"  # spaces may separate items of one user as well
    prepared = read_events(path, columns, format=format).to_dataset()
    assert histories(prepared) == ORDERED
    assert prepared.histories.times is not None
    assert prepared.histories.times.tolist() == [1, 5, 5, 2, 3, 3]
    assert prepared.manifest["counts"] == {
        "users": 2, "items": 3, "events": 6, "rows": 6, "duplicates": 0, "duplicates_dropped": 0
    }  # fmt: skip


@pytest.mark.parametrize("name", ["events.csv", "events.tsv", "events.inter"])
@pytest.mark.parametrize("blank", ["\n", "\r\n", "  \n"])
def test_blank_lines_are_no_events(tmp_path: Path, name: str, blank: str) -> None:
    separator = "," if name.endswith(".csv") else "\t"
    lines = table(separator).splitlines(keepends=True)
    (tmp_path / name).write_text("".join([*lines[:3], blank, *lines[3:], blank, blank]))
    assert histories(read_events(tmp_path / name).to_dataset()) == ORDERED
    (tmp_path / name).write_text(blank.strip(" ") + table(separator))
    assert histories(read_events(tmp_path / name).to_dataset()) == ORDERED, "before the header"
    (tmp_path / name).write_text("".join([*lines, separator.join(["a", "", "7"])]))
    with pytest.raises(ValueError, match=r"column 'item' of .* is missing in 1 of 7 events"):
        read_events(tmp_path / name)


@pytest.mark.parametrize("name", ["events.csv", "events.tsv", "events.inter"])
def test_a_quote_within_a_field_is_a_character(tmp_path: Path, name: str) -> None:
    """As in Python's csv and in spreadsheets: only a field that begins with a quote is a quoted one."""
    separator = "," if name.endswith(".csv") else "\t"
    rows = [(user, {"x": '12" disc', "y": 'a "b" c'}.get(item, item), time) for user, item, time in ROWS]
    (tmp_path / name).write_text(table(separator, rows=rows))
    found = histories(read_events(tmp_path / name).to_dataset())
    assert found == {"a": ['12" disc', 'a "b" c', "z"], "b": ['12" disc', '12" disc', "z"]}
    quoted = [(user, f'"a{separator}{item}"', time) for user, item, time in ROWS]
    (tmp_path / name).write_text(table(separator, rows=quoted))
    found = histories(read_events(tmp_path / name).to_dataset())
    assert found["a"] == [f"a{separator}{item}" for item in ORDERED["a"]]


@pytest.mark.parametrize(
    "content",
    [
        "b x\na y\na x\nb z\nb x\na z\n",
        "user item\nb x\na y\na x\nb z\nb x\na z",
        "a y x z\nb x z\nb x\n",
        "b\tx z\r\n\r\na  y x z\r\nb x\r\n",
    ],
)
def test_lines(tmp_path: Path, content: str) -> None:
    path = tmp_path / "events.txt"
    path.write_bytes(content.encode())
    prepared = read_events(path).to_dataset()
    assert histories(prepared) == BY_INPUT
    assert prepared.histories.times is None
    assert any("order of the input" in note for note in prepared.manifest["notes"])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 12), st.sampled_from("pqrst"), st.integers(-2, 4)), min_size=2, max_size=40
    ).filter(lambda rows: max(Counter(user for user, _, _ in rows).values()) > 1)
)
def test_order_is_by_time_and_ties_stay_as_they_came(rows: list[tuple[int, str, int]]) -> None:
    prepared = read_events(pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")).to_dataset()
    expected: dict[int, list[str]] = {user: [] for user in sorted({row[0] for row in rows})}
    for user, item, _ in sorted(rows, key=lambda row: row[2]):  # Python's sort is stable
        expected[user].append(item)
    assert histories(prepared) == expected
    assert list(prepared.users.users) == list(expected)


def test_frames_and_parquet(tmp_path: Path) -> None:
    frame = pl.DataFrame(ROWS, schema=["user", "item", "time"], orient="row")
    frame.write_parquet(tmp_path / "events.parquet")
    pandas = pd.DataFrame(ROWS, columns=["user", "item", "time"])
    for source in (frame, frame.lazy(), pandas, tmp_path / "events.parquet", str(tmp_path / "events.parquet")):
        assert histories(read_events(source).to_dataset()) == ORDERED
    assert histories(read_events(frame, Columns(time=None)).to_dataset()) == BY_INPUT
    with pytest.raises(ValueError, match="events must be a path"):
        read_events([1, 2])
    mixed = pandas.assign(item=pandas["item"].astype(object).where(pandas["item"] != "y", 7))
    assert histories(read_events(mixed).to_dataset())["a"] == ["7" if item == "y" else item for item in ORDERED["a"]]
    with pytest.raises(ValueError, match="more than one column 'item'"):
        read_events(pandas.set_axis(["user", "item", "item"], axis=1))


@pytest.mark.parametrize("make", [pl.DataFrame, pd.DataFrame])
def test_moments_of_every_kind_are_ordered_and_become_seconds(make: Any) -> None:
    start = datetime(2020, 1, 1)
    moments: list[list[Any]] = [
        [start + timedelta(seconds=t) for _, _, t in ROWS],
        [(start + timedelta(seconds=t)).isoformat() for _, _, t in ROWS],
        [datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=t) for _, _, t in ROWS],
        [date(2020, 1, t) for _, _, t in ROWS],
        [f"2020-01-0{t}" for _, _, t in ROWS],
        [str(t / 4) for _, _, t in ROWS],
        [t / 4 for _, _, t in ROWS],
    ]
    for kind, times in enumerate(moments):
        prepared = read_events(
            make({"user": [r[0] for r in ROWS], "item": [r[1] for r in ROWS], "time": times})
        ).to_dataset()
        assert histories(prepared) == ORDERED
        assert prepared.histories.times is not None
        scale = {3: 86400, 4: 86400, 5: 0.25, 6: 0.25}.get(kind, 1)
        assert (np.diff(prepared.histories.times[:3]) / scale).tolist() == [4, 0]
        assert any("the events were sorted by time" in note for note in prepared.manifest["notes"])


def test_ids_keep_what_they_are(tmp_path: Path) -> None:
    def items(values: Any) -> list[Any]:
        return list(read_events(pl.DataFrame({"user": [1, 1], "item": values})).to_dataset().catalogue.items)

    assert items(["10", "9"]) == [9, 10]
    assert items(["007", "7"]) == ["007", "7"]
    assert items([2.0, 1.0]) == [1, 2]
    assert items(pl.Series(["b", "a"], dtype=pl.Categorical)) == ["a", "b"]
    large = pl.DataFrame({"user": pl.Series([2**63 + 5, 1], dtype=pl.UInt64), "item": [2.0, 2.0**52]})
    assert read_events(large).frame.rows() == [("9223372036854775813", 2), ("1", 2**52)]
    for wrong in ([float("inf"), 1.0], [1e300, 1.0], [[1], [2]]):
        with pytest.raises(ValueError, match="ids must be text or integers"):
            read_events(pl.DataFrame({"user": wrong, "item": [1, 2]}))
    with pytest.raises(ValueError, match="fractions"):
        items([1.5, 2.0])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9).map(str), st.sampled_from("ab")), min_size=2, max_size=12)
)
def test_an_id_as_number_and_as_text_is_one_and_is_reported(ids: list[Any]) -> None:
    frame = pd.DataFrame({"user": ["u"] * len(ids), "item": pd.Series(ids, dtype=object)})
    prepared = read_events(frame).to_dataset()
    both = {value for value in ids if isinstance(value, int)} & {
        int(value) for value in ids if str(value).isdecimal() and isinstance(value, str)
    }
    said = [note for note in prepared.manifest["notes"] if "both as a number and as text" in note]
    assert len(said) == bool(both)
    assert all(f"column 'item' has {len(both)} ids" in note for note in said)
    assert len(prepared.catalogue) == len({str(value) for value in ids})


CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("events.csv", "", {}, "is empty"),
    ("events.csv", "user,item\n", {}, "is empty"),
    ("events.txt", "\n\n", {}, "is empty"),
    ("events.csv", "user,item\na,x\nb,y\n", {}, "no user has 2 or more events"),
    ("events.csv", table(), {"columns": Columns(item="product")}, "has no column 'product' .item.; it has user, item, time"),
    ("events.csv", table(), {"columns": Columns(features=("brand",))}, "has no column 'brand'.*--data.features NAME"),
    ("events.csv", table(), {"columns": Columns("item")}, "must be different columns"),
    ("events.csv", table(names="a,b,c"), {}, "usual name for the user; it has a, b, c .*user=.NAME. in Python, --data.user"),
    ("events.csv", table(names="user,b,c"), {}, "usual name for the item.*item=.NAME. in Python, --data.item NAME"),
    ("events.csv", table(names="user,user,item"), {}, "has more than one column 'user': rename one of them"),
    ("events.csv", table(names='user,"item","item"'), {}, "has more than one column 'item': rename"),
    ("events.inter", "user_id:token\titem_id:token\titem_id:float\na\tx\t3\na\ty\t4\n", {}, "more than one column 'item_id'"),
    ("events.csv", table(names=""), {}, "has 3 columns and no header: name the time"),
    ("events.csv", table(names=""), {"columns": Columns("0", "7")}, "no column '7'"),
    ("events.csv", table(rows=[*ROWS, ("a", "x", "")]), {}, "missing in 1 of 7 events, first in event 7.*order of the input"),
    ("events.csv", table(rows=[*ROWS, ("a", "", 3)]), {}, "'item' of .* is missing in 1 of 7 events"),
    ("events.csv", table(rows=[("a", "x", "01/02/2024"), ("a", "y", "02/01/2024")]), {}, "'01/02/2024', which may be read day"),
    ("events.csv", table(rows=[("a", "x", "2024-01-02"), ("a", "y", "31-01-2024")]), {}, "'31-01-2024', "),
    ("events.csv", table(rows=[*ROWS, ("a", "x", "soon")]), {}, "'soon', neither a number nor an ISO 8601 time"),
    ("events.csv", table(rows=[*ROWS, ("a", "x", "inf")]), {}, "not finite"),
    ("events.csv", table(rows=[*ROWS, ("a", "x", "3", "4")]), {}, "cannot be read as a table"),
    ("events.txt", "a 1 2 3\nb 1 2 3\n", {}, "every line of .* has 4 fields: a table, or a user and items"),
    ("events.txt", "a 1\na 2\n", {"columns": Columns(time="when")}, "lines of a user and items, so it has no column 'when'"),
    ("events.csv.xz", table(), {}, "does not decompress"),
    ("events.csv.gz", table(), {}, "does not decompress"),
    ("events.csv", table(), {"format": "xml"}, "format must be one of"),
    ("events.csv", table(), {"duplicates": "merge"}, "duplicates must be"),
    ("events.parquet", "no", {}, "is not a parquet file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "arguments", "sentence"), CASES)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, content: str, arguments: dict, sentence: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        read_events(path, **arguments).to_dataset()


def test_a_repeated_column_that_is_not_used_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(table(names="user,item,time,note,note", rows=[(*row, 1, 2) for row in ROWS]))
    assert histories(read_events(path).to_dataset()) == ORDERED
    with pytest.raises(ValueError, match="more than one column 'note'"):
        read_events(path, Columns(features=("note",)))


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_events(tmp_path / "nothing.csv")
    (tmp_path / "events.csv").write_bytes(b"user,item\n\xff\xfe,x\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_events(tmp_path / "events.csv")


def test_duplicates_are_counted_and_dropped_only_on_request() -> None:
    frame = pl.DataFrame([*ROWS, ROWS[0], ROWS[3], ROWS[0]], schema=["user", "item", "time"], orient="row")
    kept = read_events(frame).to_dataset()
    assert kept.manifest["counts"]["duplicates"] == 3
    assert len(kept.histories.items) == 9
    dropped = read_events(frame, duplicates="drop").to_dataset()
    assert histories(dropped) == ORDERED
    assert dropped.manifest["counts"]["duplicates_dropped"] == 3
    untimed = read_events(frame, Columns(time=None), duplicates="drop").to_dataset()
    assert histories(untimed) == {"a": ["y", "x", "z"], "b": ["x", "z"]}


def test_features_of_items() -> None:
    frame = pl.DataFrame(
        {"user": [1, 1, 1, 1], "item": ["x", "y", "x", "z"], "brand": [None, "q", "p", None], "size": [3, 1, 2, 3]}
    )
    prepared = read_events(frame, Columns(features=("brand", "size"))).to_dataset()
    brand, size = prepared.catalogue.features["brand"], prepared.catalogue.features["size"]
    assert [brand.values[v] for v in brand.of_item] == [None, "p", "q", None]
    assert [size.values[v] for v in size.of_item] == [None, 3, 1, 3]
    assert any("1 items have more than one size" in note for note in prepared.manifest["notes"])

    nested = frame.with_columns(brand=pl.struct("size", "brand"))
    with pytest.raises(
        ValueError, match=r"'brand' of the events holds Struct.*: a feature is a value, a list or a vector"
    ):
        read_events(nested, Columns(features=("brand",))).to_dataset()


@pytest.mark.parametrize("name", ["user", "item", "time", "several"])
def test_features_may_be_called_anything(name: str) -> None:
    frame = pl.DataFrame({"who": [1, 1, 2], "what": ["x", "y", "x"], name: ["p", "q", "p"]})
    prepared = read_events(frame, Columns("who", "what", None, (name,))).to_dataset()
    assert histories(prepared) == {1: ["x", "y"], 2: ["x"]} and prepared.histories.times is None
    feature = prepared.catalogue.features[name]
    assert [feature.values[v] for v in feature.of_item] == [None, "p", "q"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_core_is_the_largest_set_in_which_all_have_enough(events: list[tuple[int, int]], k: int, m: int) -> None:
    kept = core_mask(np.array([u for u, _ in events]), np.array([i for _, i in events]), k, m)
    left = list(events)
    while True:  # one at a time: the fixed point does not depend on the order
        users, items = Counter(u for u, _ in left), Counter(i for _, i in left)
        poor = next((event for event in left if users[event[0]] < k or items[event[1]] < m), None)
        if poor is None:
            break
        left.remove(poor)
    assert sorted(event for event, keep in zip(events, kept, strict=True) if keep) == sorted(left)


def test_core_of_a_log() -> None:
    events = read_events(pl.DataFrame(ROWS, schema=["user", "item", "time"], orient="row"))
    core = k_core(events, items=2)
    assert histories(core.to_dataset()) == {"a": ["x", "z"], "b": ["x", "x", "z"]}
    assert core.to_dataset().manifest["counts"]["events_dropped"] == core.counts["items_dropped"] == 1
    with pytest.raises(ValueError, match="no event is left if each user needs 9"):
        k_core(events, users=9)
    with pytest.raises(ValueError, match="users must be at least 1"):
        k_core(events, users=0)


def test_ids_and_rows() -> None:
    catalogue = Catalogue(["x", "y", "7"], {"brand": Feature([None, "q"], np.array([0, 1, 0, 1]))})
    assert catalogue.index(["7", "x", 7]).tolist() == [3, 1, 3]
    assert Users([5, 6]).index(["6", 5, np.int64(6)]).tolist() == [1, 0, 1]
    assert catalogue.index(["x", "no", "y"], unknown="skip").tolist() == [1, 2]
    with pytest.raises(ValueError, match="2 of 3 items are unknown: 'no', 8"):
        catalogue.index(["no", "x", 8])
    with pytest.raises(ValueError, match="1 of 1 users are unknown: 'six'"):
        Users([5, 6]).index(["six"])
    with pytest.raises(ValueError, match="'error' or 'skip'"):
        catalogue.index([], unknown="guess")
    with pytest.raises(ValueError, match="not distinct"):
        Users([1, 1]).index([1])
    with pytest.raises(ValueError, match="feature brand needs one value"):
        Catalogue(["x"], {"brand": Feature([None], np.array([0]))})


def test_prepared_folder_round_trip(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text(table(names="user,item,time,kind", rows=[(*row, "é") for row in ROWS]))
    recipe = EventRecipe(source=str(tmp_path / "events.csv"), features=("kind",), min_item=2)
    said: list[str] = []
    first = prepare_dataset(recipe, tmp_path / "cache", report=said.append)
    again = prepare_dataset(recipe, tmp_path / "cache", report=said.append)
    assert len(said) == 1
    assert first.folder is not None
    by_folder = prepare_dataset(EventRecipe(source=str(first.folder)))
    for other in (again, by_folder, open_dataset(first.folder)):
        assert histories(other) == {"a": ["x", "z"], "b": ["x", "x", "z"]}
        assert other.catalogue.features["kind"].values == [None, "é"]
        assert other.digest == first.digest and other.manifest == first.manifest
    assert first.manifest["counts"]["rows"] == 6 and first.manifest["recipe"]["min_item"] == 2
    assert prepare_dataset(EventRecipe(source=recipe.source), tmp_path / "cache").digest != first.digest
    fresh = read_events(tmp_path / "events.csv", Columns(features=("kind",)))
    assert k_core(fresh, items=2).to_dataset().digest == first.digest
    with pytest.raises(ValueError, match="exists already"):
        first.save(first.folder)


def test_damaged_or_wrong_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text(table())
    folder = prepare_dataset(EventRecipe(source=str(tmp_path / "events.csv")), tmp_path / "cache").folder
    assert folder is not None
    items = folder / "items.json"
    items.write_text(items.read_text().replace("x", "w"))
    with pytest.raises(ValueError, match="are damaged: remove the folder"):
        open_dataset(folder)
    items.unlink()
    with pytest.raises(ValueError, match=r"is not a folder of prepared events: it has no items.json"):
        open_dataset(folder)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        prepare_dataset(EventRecipe(source=str(tmp_path / "none.csv")), tmp_path / "cache")


def test_prepared_events_need_no_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That no other module imports it is seen where a model is trained without it (test_train_rec_command.py)."""
    (tmp_path / "events.csv").write_text(table())
    recipe = EventRecipe(source=str(tmp_path / "events.csv"))
    folder = prepare_dataset(recipe, tmp_path / "cache").folder
    assert folder is not None
    monkeypatch.setitem(sys.modules, "polars", None)
    for name in ("formats", "event_table"):  # as if no table had been read yet
        monkeypatch.delitem(sys.modules, f"prism.recommend.events.{name}")
    assert len(Samples(leave_one_out(open_dataset(folder).histories).histories, 3)) == 2
    with pytest.raises(ImportError, match="needs polars: pip install"):
        prepare_dataset(replace(recipe, min_item=2), tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"user,item\na,b\n\xe9,c\n", r"events\.csv is not UTF-8 text: .* in line 3$"),
        (
            b"user,item\na,b\nb,c\na,b,c,d\n",
            r"events\.csv cannot be read as a table: line 4 has 4 fields, the first line 2$",
        ),
        (b"customer,item\na,b\n", r"no column with a usual name for the user.* --data\.user NAME"),
    ],
)
def test_errors_of_a_bad_table_name_its_line_or_flag(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "events.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_events(tmp_path / "events.csv")
