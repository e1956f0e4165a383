"""What is known of items and users: columns of tables become codes of values, lists of values, or vectors.

The type of a column decides what it is:

- integers, text and other single values: one value each;
- lists, and text with a separator such as "Action|Comedy": any number of values each;
- lists of fractions, all of one length: a vector each, such as the embedding of a text or an image.

Columns come from the events (an item's first value counts) or from a table with one row per item or user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prism.recommend.events.columns import AUTO, Columns, KeyedColumns
from prism.recommend.events.dataset import Dataset
from prism.recommend.events.formats import column_names, pl, read_table
from prism.recommend.events.ids import Catalogue, Feature, Users
from prism.recommend.events.values import as_table, codes, frame_columns, ids

if TYPE_CHECKING:
    from prism.recommend.events.recipe import EventRecipe  # which imports this module when it reads a table

VECTORS = "vectors"
"""Name of vectors that are given as an array or a mapping."""


class Tables(NamedTuple):
    """Tables with a row per item or user, each as a file or in memory; see `Recommender.fit`."""

    items: Any = None
    users: Any = None
    item_vectors: Any = None

    @property
    def in_memory(self) -> bool:
        return any(table is not None and not isinstance(table, (str, Path)) for table in self)


class Described(NamedTuple):
    """Features and vectors of some rows, and notes on what was found."""

    features: dict[str, Feature]
    vectors: dict[str, np.ndarray]
    notes: list[str]


class Origin(NamedTuple):
    """Which table each feature comes from."""

    events: Columns
    items: KeyedColumns
    users: KeyedColumns
    tables: Tables


def sources(recipe: EventRecipe, tables: Tables | None = None) -> Origin:
    """Assign the features of a recipe: to the table of items or users if it has the column, else to the events."""
    tables = Tables() if tables is None else tables
    tables = Tables(*(getattr(recipe, name) if mine is None else mine for name, mine in tables._asdict().items()))
    item, user = (AUTO if key.isdecimal() else key for key in (recipe.item, recipe.user))
    there = {role: _names(getattr(tables, role), role) for role in ("items", "users")}
    ours = tuple(name for name in recipe.features if name in there["items"])
    theirs = tuple(name for name in recipe.user_features if name in there["users"])
    events = Columns(
        recipe.user,
        recipe.item,
        recipe.time,
        tuple(name for name in recipe.features if name not in ours),
        tuple(name for name in recipe.user_features if name not in theirs),
    )
    return Origin(events, KeyedColumns("item", item, ours), KeyedColumns("user", user, theirs), tables)


def _names(table: Any, role: str) -> list[str]:
    """The columns of a table of items or users."""
    if table is None:
        return []
    if isinstance(table, (str, Path)):
        return column_names(Path(table).expanduser())
    return frame_columns(table, role)


def describe(dataset: Dataset, origin: Origin, separator: str | None) -> Dataset:
    """The dataset with features from tables added to those from its events; `separator` splits texts into lists."""
    catalogue, people, notes, tables = dataset.catalogue, dataset.users, list[str](), origin.tables
    if origin.items.features:
        found = _from_table(tables.items, origin.items, catalogue, separator, "items")
        features, vectors = {**catalogue.features, **found.features}, {**catalogue.vectors, **found.vectors}
        catalogue = Catalogue(catalogue.items, features, vectors)
        notes += found.notes
    if tables.item_vectors is not None:
        found = item_vectors(tables, origin.items, catalogue)
        catalogue = Catalogue(catalogue.items, catalogue.features, {**catalogue.vectors, **found.vectors})
        notes += found.notes
    if origin.users.features:
        found = _from_table(tables.users, origin.users, people, separator, "users")
        refuse_vectors(found)
        people = Users(people.users, {**people.features, **found.features})
        notes += found.notes
    if catalogue is dataset.catalogue and people is dataset.users:
        return dataset
    manifest = {**dataset.manifest, "notes": [*dataset.manifest.get("notes", []), *notes]}
    return Dataset(dataset.histories, catalogue, people, manifest)


def refuse_vectors(users: Described) -> None:
    """Raise ValueError for vectors among the features of users."""
    if users.vectors:
        raise ValueError(
            f"user_features has {min(users.vectors)!r}, which holds vectors: a user has values or lists of values"
        )


def _from_table(
    source: Any, columns: KeyedColumns, known: Catalogue | Users, separator: str | None, name: str
) -> Described:
    """The features of known items or users from a table, which may have further rows."""
    table, found, where = _open(source, columns, f"the table {name}")
    keys = ids(table[found.key], where)
    described = {feature: table[feature] for feature in found.features}
    rows = _rows_of(keys, known)
    lost = len(known) - len(np.unique(rows[rows >= 0]))
    result = encode(described, rows, len(known) + known.first, separator, where, name)
    if lost:
        result.notes.append(f"{lost:,} of {len(known):,} {name} are not in {where}: they have no features")
    return result


def _open(source: Any, columns: KeyedColumns, what: str) -> tuple[pl.DataFrame, KeyedColumns, str]:
    if isinstance(source, (str, Path)):
        table, found, _ = read_table(Path(source).expanduser(), "auto", columns)
        return table, found, str(source)
    found = columns.found(frame_columns(source, what), what)
    return as_table(source, found.wanted, what), found, what


def item_vectors(tables: Tables, columns: KeyedColumns, catalogue: Catalogue) -> Described:
    """Vectors that are given as a mapping, a table, or an array whose rows are those of the items' table."""
    given = tables.item_vectors
    if isinstance(given, Mapping):
        given = pl.DataFrame(
            {
                "item": pl.Series(list(given)),
                VECTORS: [np.asarray(x, dtype=np.float64).tolist() for x in given.values()],
            }
        )
    if isinstance(given, (str, Path)) and Path(given).suffix in (".npy", ".safetensors"):
        given = _array(Path(given).expanduser())
    if hasattr(given, "columns") or isinstance(given, (str, Path)):
        return _from_table(given, _vector_columns(given, columns.key), catalogue, None, "item_vectors")
    array = np.asarray(given)
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise ValueError(f"item_vectors must be numbers [items, V], got {array.dtype} {list(array.shape)}")
    if tables.items is None:
        raise ValueError(
            "item_vectors is an array, which does not say whose vectors they are: give the table of items (items, "
            "--data.items), whose rows they follow, or a mapping from ids to vectors"
        )
    table, found, where = _open(tables.items, replace(columns, features=()), "the table items")
    if len(table) != len(array):
        raise ValueError(
            f"item_vectors has {len(array):,} rows, but {where} has {len(table):,}: give one vector per item"
        )
    keys = ids(table[found.key], where)
    vectors = pl.Series(VECTORS, array.astype(np.float64))
    return encode({VECTORS: vectors}, _rows_of(keys, catalogue), len(catalogue) + 1, None, "item_vectors")


def _vector_columns(source: Any, key: str) -> KeyedColumns:
    """The columns of a table of vectors: the item's id and one more."""
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            names = list(pl.read_parquet_schema(path))
        except pl.exceptions.PolarsError as error:
            raise ValueError(f"item_vectors must be a .npy, .safetensors or parquet file, got {path}") from error
    else:
        names = [str(name) for name in source.columns]
    chosen = KeyedColumns("item", key).found(names, "item_vectors").key
    others = [name for name in names if name != chosen]
    if len(others) != 1:
        raise ValueError(
            f"item_vectors must have the column {chosen!r} and one column of vectors, it has {', '.join(names)}"
        )
    return KeyedColumns("item", chosen, tuple(others))


def _array(path: Path) -> np.ndarray:
    """The array of a .npy file or the only tensor of a safetensors file; nothing is unpickled."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if path.suffix == ".npy":
            loaded: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
            return loaded
        from safetensors.numpy import load_file

        tensors = load_file(path)
    except Exception as error:  # numpy and safetensors raise errors of their own
        raise ValueError(f"{path} cannot be read as an array: {str(error).strip().splitlines()[0]}") from error
    if len(tensors) != 1:
        raise ValueError(f"{path} must hold one tensor, it has {', '.join(tensors) or 'none'}")
    return next(iter(tensors.values()))


def _rows_of(keys: pl.Series, known: Catalogue | Users) -> np.ndarray:
    """The rows of ids, int64, -1 for unknown ones; an integer and its text are one id."""
    series = pl.Series(list(known.ids))
    if series.dtype != keys.dtype:
        series, keys = series.cast(pl.String), keys.cast(pl.String)
    found = keys.replace_strict(series, pl.int_range(len(series), eager=True), default=None, return_dtype=pl.Int64)
    return found.fill_null(-1 - known.first).to_numpy() + known.first


def encode(
    columns: dict[str, pl.Series], rows: np.ndarray, total: int, separator: str | None, where: str, of: str = "items"
) -> Described:
    """Columns as codes or vectors of `total` rows; entry e of a column describes row `rows[e]` (below 0: none of them).

    The first value of a row that is not missing counts. Rows without one have no value.
    """
    features, vectors, notes = {}, {}, []
    for name, column in columns.items():
        values = _as_values(column, separator, where)
        known = pl.DataFrame({"row": rows, "value": values}).filter(pl.col("row") >= 0).drop_nulls()
        first = known.group_by("row", maintain_order=True).agg(pl.col("value").first())
        if several := len(known.unique()) - len(first):
            several = known.unique().group_by("row").len().filter(pl.col("len") > 1).height
            notes.append(f"{several:,} {of} have more than one {name}: the first is used")
        if values.dtype == pl.List(pl.Float32):
            vectors[name] = _vectors(first, total, name, where)
        elif values.dtype.is_nested():
            features[name] = _lists(first, total)
        else:
            distinct = first["value"].unique().sort()
            of_item = np.zeros(total, dtype=np.int64)
            of_item[first["row"].to_numpy()] = codes(first["value"], distinct).to_numpy() + 1
            features[name] = Feature([None, *distinct.to_list()], of_item)
    return Described(features, vectors, notes)


def _as_values(column: pl.Series, separator: str | None, where: str) -> pl.Series:
    """Single values (integers or text), lists of them, or lists of float32."""
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if isinstance(column.dtype, pl.List):
        inner = column.dtype.inner
        if inner.is_float():
            return column.cast(pl.List(pl.Float32))
        if inner.is_nested():
            raise ValueError(
                f"column {column.name!r} of {where} holds {column.dtype}: a feature is a value, a list or a vector"
            )
        return column if inner.is_integer() else column.cast(pl.List(pl.String))
    if column.dtype.is_nested():
        raise ValueError(
            f"column {column.name!r} of {where} holds {column.dtype}: a feature is a value, a list or a vector"
        )
    if column.dtype == pl.String and separator:
        if column.str.contains(separator, literal=True).any():
            return column.str.split(separator).list.eval(pl.element().str.strip_chars())
        return column.set(column == "", None)  # an empty list
    return column if column.dtype.is_integer() else column.cast(pl.String)


def _lists(first: pl.DataFrame, total: int) -> Feature:
    """Lists of values as padded codes `[total, W]`; missing and empty values and repetitions are left out."""
    each = first.with_columns(value=pl.col("value").list.unique(maintain_order=True)).explode("value").drop_nulls()
    if each["value"].dtype == pl.String:
        each = each.filter(pl.col("value") != "")
    distinct = each["value"].unique().sort()
    place = each.select(place=pl.int_range(pl.len()).over("row"))["place"].to_numpy()
    of_item = np.zeros((total, max(1, int(place.max(initial=0)) + 1)), dtype=np.int64)
    of_item[each["row"].to_numpy(), place] = codes(each["value"], distinct).to_numpy() + 1
    return Feature([None, *distinct.to_list()], of_item)


def _vectors(first: pl.DataFrame, total: int, name: str, where: str) -> np.ndarray:
    if not len(first):
        raise ValueError(
            f"column {name!r} of {where} has no vector of an item in the events: give it the ids they have"
        )
    lengths = first["value"].list.len()
    if lengths.n_unique() != 1:
        sizes = ", ".join(map(str, sorted(lengths.unique().to_list())[:3]))
        raise ValueError(f"the vectors in column {name!r} of {where} must have one length, they have {sizes}")
    size = int(lengths[0])
    flat = first["value"].explode().to_numpy()
    if not np.isfinite(flat).all():
        raise ValueError(f"the vectors in column {name!r} of {where} hold missing, infinite or NaN numbers")
    vectors = np.zeros((total, size), dtype=np.float32)
    vectors[first["row"].to_numpy()] = flat.reshape(-1, size)
    return vectors
