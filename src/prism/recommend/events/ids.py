"""Ids of users and items, and the rows that stand for them inside the model: saved with every model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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
        """Rows of the ids, int64. A number may be given as text and vice versa.

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
            row = self._rows.get(int(name) if isinstance(name, str) and _is_number(name) else str(name), -1)
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


@dataclass(frozen=True)
class Users(Ids):
    """Users are rows 0 … U-1."""

    users: Sequence[Id]

    first: ClassVar[int] = 0
    kind: ClassVar[str] = "user"
    if_unknown: ClassVar[str] = "; for a user who is not in the events, give the history (sequences, --sequences)"

    @property
    def ids(self) -> Sequence[Id]:
        return self.users

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Users:
        return cls(content["users"])

    @classmethod
    def load(cls, path: Path) -> Users:
        return cls.from_json(read_json(path))


class Feature(NamedTuple):
    """A property of items: item i has `values[of_item[i]]`; of_item `[N + 1]`. values[0] is None: unknown, and for row 0."""

    values: list[Any]
    of_item: np.ndarray


@dataclass(frozen=True)
class Catalogue(Ids):
    """Items are rows 1 … N; row 0 is no item."""

    items: Sequence[Id]
    features: dict[str, Feature] = field(default_factory=dict)

    first: ClassVar[int] = 1
    kind: ClassVar[str] = "item"

    def __post_init__(self) -> None:
        for name, feature in self.features.items():
            if feature.of_item.shape != (len(self) + 1,) or feature.of_item[0] != 0 or feature.values[0] is not None:
                raise ValueError(f"feature {name} needs one value for row 0 (None) and for each of {len(self)} items")

    @property
    def ids(self) -> Sequence[Id]:
        return self.items

    def to_json(self) -> dict[str, Any]:
        features = {
            name: {"values": feature.values, "of_item": feature.of_item.tolist()}
            for name, feature in self.features.items()
        }
        return {**super().to_json(), "features": features}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Catalogue:
        features = {
            name: Feature(feature["values"], np.array(feature["of_item"], dtype=np.int64))
            for name, feature in content["features"].items()
        }
        return cls(content["items"], features)

    @classmethod
    def load(cls, path: Path) -> Catalogue:
        return cls.from_json(read_json(path))


def _is_number(text: str) -> bool:
    return text.isdecimal() or (text[:1] == "-" and text[1:].isdecimal())
