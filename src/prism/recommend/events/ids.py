"""Ids of users and items, and the rows that stand for them inside the model: saved with every model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from prism.files import read_json, write_atomically

Id: TypeAlias = str | int


def is_list(ids: Any) -> bool:
    """Whether this is a list, array, tensor, series … of ids, and not one id."""
    return isinstance(ids, Iterable) and not isinstance(ids, str) and getattr(ids, "ndim", 1) > 0


def as_list(ids: Any) -> Sequence[Any]:
    """Ids as a list: several, one, or none (None). Arrays and tensors become numbers of Python."""
    if ids is None:
        return ()
    if not is_list(ids):
        return (ids.item() if hasattr(ids, "item") else ids,)
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


class Ids:
    """Distinct ids, all text or all integers; the first one is row `first`."""

    first: ClassVar[int]
    kind: ClassVar[str]
    if_unknown: ClassVar[str] = ""
    """Appended to the message about unknown ids: what to do instead."""

    @property
    def ids(self) -> Sequence[Id]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def array(self) -> np.ndarray:
        """The ids as an array: int64, or objects that are text."""
        integers = all(isinstance(name, int) for name in self.ids)
        return np.array(list(self.ids), dtype=np.int64 if integers else object)

    def index(self, ids: Iterable[Any], unknown: Literal["error", "skip"] = "error") -> np.ndarray:
        """Rows of the ids, int64. A number may be given as text and vice versa; "007" is not 7.

        Args:
            unknown: refuse unknown ids ("error") or drop them ("skip").
        """
        if unknown not in ("error", "skip"):
            raise ValueError(f"unknown must be 'error' or 'skip', got {unknown!r}")
        asked = list(ids)
        rows = self.rows(asked)
        missing = [asked[place] for place in np.flatnonzero(rows < 0)]
        if missing and unknown == "error":
            shown = ", ".join(repr(name) for name in missing[:5]) + (" …" if len(missing) > 5 else "")
            raise ValueError(f"{len(missing)} of {len(asked)} {self.kind}s are unknown: {shown}{self.if_unknown}")
        return rows[rows >= 0]

    def rows(self, ids: Sequence[Any]) -> np.ndarray:
        """Rows of the ids, int64, -1 for unknown ids."""
        return np.array([self._row(name) for name in ids], dtype=np.int64)

    def names(self, rows: Iterable[int]) -> list[Id]:
        """The ids of rows."""
        return [self.ids[int(row) - self.first] for row in rows]

    def _row(self, name: Any) -> int:
        try:
            row = self._rows.get(name)
        except TypeError:
            raise ValueError(f"{self.kind}s must be text or integers, got {type(name).__name__} {name!r}") from None
        if row is None:
            row = self._rows.get(int(name) if isinstance(name, str) and _is_integer(name) else str(name), -1)
        return row

    @cached_property
    def _rows(self) -> dict[Id, int]:
        rows = {name: row for row, name in enumerate(self.ids, self.first)}
        if len(rows) != len(self.ids):
            raise ValueError(f"the {self.kind}s are not distinct: {len(self.ids) - len(rows)} occur twice")
        return rows

    def to_json(self) -> dict[str, Any]:
        return {f"{self.kind}s": list(self.ids)}

    def to_bytes(self) -> bytes:
        """The contents of a JSON file; compact, because indented a million ids would take a line each."""
        return json.dumps(self.to_json(), ensure_ascii=False).encode()

    def save(self, path: Path) -> None:
        write_atomically(path, self.to_bytes())


class Feature(NamedTuple):
    """A property of items or users. values[0] is None: no value, and for row 0 of the items.

    One value each: row i has `values[of_item[i]]`, of_item `[rows]`. A list of values each: of_item `[rows, W]`, and row i has
    the values of its codes that are not 0; W is the length of the longest list.
    """

    values: list[Any]
    of_item: np.ndarray

    @property
    def is_list(self) -> bool:
        return self.of_item.ndim == 2

    @property
    def width(self) -> int:
        """Codes per row: 1, or the length of the longest list."""
        return self.of_item.shape[1] if self.is_list else 1

    def values_of(self, row: int) -> list[Any]:
        """The values of a row: none, one or several."""
        return [self.values[code] for code in np.atleast_1d(self.of_item[row]) if code > 0]

    def codes(self, entries: Sequence[Any]) -> np.ndarray:
        """Codes of values, int64 `[entries, width]`; an entry is a value, a list of values, or None. Unknown ones are none."""
        known = {value: code for code, value in enumerate(self.values) if code}
        known = {str(value): code for value, code in known.items()} | known
        found = np.zeros((len(entries), self.width), dtype=np.int64)
        for row, entry in enumerate(entries):
            values = entry if isinstance(entry, (list, tuple, np.ndarray)) else [entry]
            each = [known.get(value, known.get(str(value), 0)) for value in values if value is not None]
            each = [code for code in each if code][: self.width]
            found[row, : len(each)] = each
        return found

    def to_json(self) -> dict[str, Any]:
        return {"values": self.values, "of_item": self.of_item.tolist()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Feature:
        return cls(content["values"], np.array(content["of_item"], dtype=np.int64))


@dataclass(frozen=True)
class Users(Ids):
    """Users are rows 0 … U-1."""

    users: Sequence[Id]
    features: dict[str, Feature] = field(default_factory=dict)

    first: ClassVar[int] = 0
    kind: ClassVar[str] = "user"
    if_unknown: ClassVar[str] = "; for a user who is not in the events, give the history (sequences, --sequences)"

    def __post_init__(self) -> None:
        _check_features(self.features, len(self), "users")

    @property
    def ids(self) -> Sequence[Id]:
        return self.users

    @cached_property
    def profiles(self) -> np.ndarray | None:
        """Codes of all features, int64 `[U, sum of their widths]`, by the features' names; None without features."""
        if not self.features:
            return None
        return np.concatenate([self.features[name].of_item.reshape(len(self), -1) for name in sorted(self.features)], 1)

    def codes(self, values: Mapping[str, Sequence[Any]], users: int) -> np.ndarray:
        """`profiles` of other users, int64 `[users, W]`, from their values by feature; unknown values are none.

        Args:
            values: for each feature one entry per user: a value, a list of values (for a list feature), or None.
        """
        for name, column in values.items():
            if name not in self.features:
                known = ", ".join(sorted(self.features)) or "none"
                raise ValueError(f"user_features has {name!r}, but the model has the features {known}")
            if len(column) != users:
                raise ValueError(
                    f"user_features[{name!r}] must have one entry for each of {users} users, got {len(column)}"
                )
        parts = [np.zeros((users, 0), dtype=np.int64)]
        parts += [self.features[name].codes(values.get(name, [None] * users)) for name in sorted(self.features)]
        return np.concatenate(parts, 1)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), **_features_json(self.features)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Users:
        features = content.get("features", {})
        return cls(content["users"], {name: Feature.from_json(feature) for name, feature in features.items()})

    @classmethod
    def load(cls, path: Path) -> Users:
        return cls.from_json(read_json(path))


@dataclass(frozen=True)
class Catalogue(Ids):
    """Items are rows 1 … N; row 0 is no item.

    Attributes:
        features: properties of the items, by name.
        vectors: `{name: float32 [N + 1, V]}`, vectors that were given for the items; row 0 and unknown ones are zeros. A
            catalogue that was opened from a model's folder has none: they are among the model's weights.
        vector_marks: `{name: (V, hash)}`, also where `vectors` is empty.
    """

    items: Sequence[Id]
    features: dict[str, Feature] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    vector_marks: dict[str, tuple[int, str]] = field(default_factory=dict)

    first: ClassVar[int] = 1
    kind: ClassVar[str] = "item"

    def __post_init__(self) -> None:
        _check_features(self.features, len(self) + 1, "items (row 0 is no item)")
        for name, feature in self.features.items():
            if feature.of_item[0].any():
                raise ValueError(f"feature {name} must have no value in row 0, which is no item")
        for name, vectors in self.vectors.items():
            if vectors.ndim != 2 or len(vectors) != len(self) + 1:
                raise ValueError(f"vectors {name} must be [{len(self) + 1}, V], got {list(vectors.shape)}")
        if self.vectors:
            marks = {name: (x.shape[1], hashlib.sha256(x.tobytes()).hexdigest()) for name, x in self.vectors.items()}
            object.__setattr__(self, "vector_marks", marks)

    @property
    def ids(self) -> Sequence[Id]:
        return self.items

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {name: size for name, (size, _) in self.vector_marks.items()}

    def to_json(self) -> dict[str, Any]:
        features = {name: feature.to_json() for name, feature in self.features.items()}
        marks = {"vectors": {name: list(mark) for name, mark in self.vector_marks.items()}} if self.vector_marks else {}
        return {**super().to_json(), "features": features, **marks}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Catalogue:
        features = {name: Feature.from_json(feature) for name, feature in content["features"].items()}
        marks = {name: (size, digest) for name, (size, digest) in content.get("vectors", {}).items()}
        return cls(content["items"], features, vector_marks=marks)

    @classmethod
    def load(cls, path: Path) -> Catalogue:
        return cls.from_json(read_json(path))


def _features_json(features: dict[str, Feature]) -> dict[str, Any]:
    """The entry of the features; none without features."""
    return {"features": {name: feature.to_json() for name, feature in features.items()}} if features else {}


def _check_features(features: dict[str, Feature], rows: int, what: str) -> None:
    for name, feature in features.items():
        if feature.of_item.ndim not in (1, 2) or len(feature.of_item) != rows or feature.values[0] is not None:
            raise ValueError(
                f"feature {name} needs one value, or one list of values, for each of {rows:,} {what}, and None as values[0]"
            )


def _is_integer(text: str) -> bool:
    """Whether a text is how an integer of 64 bits is written: "007" is another id than 7."""
    return text.removeprefix("-").isdecimal() and len(text) <= 20 and str(int(text)) == text
