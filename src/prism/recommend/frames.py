"""Recommendations as a pandas or polars DataFrame, with the column names of the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from prism.messages import missing_extra

Library = Literal["pandas", "polars"]


@dataclass(frozen=True)
class Source:
    """Where the events came from, as far as results should look like them."""

    user: str = "user"
    """Column of the users."""
    item: str = "item"
    """Column of the items."""
    library: Library = "polars"
    """The library of the DataFrame; polars for files."""
    text: frozenset[str] = frozenset()
    """"user", "item": ids that were read as integers, but are text in the events and in results."""

    @classmethod
    def of(cls, origin: Mapping[str, Any]) -> Source:
        """From what a dataset's manifest, or a model, keeps of the origin; the usual names where it says nothing."""
        library: Library = "pandas" if origin.get("library") == "pandas" else "polars"
        text = frozenset(origin.get("text", ()))
        return cls(origin.get("user", cls.user), origin.get("item", cls.item), library, text)

    def users(self, ids: Sequence[Any]) -> Sequence[Any]:
        """Users' ids as in the events."""
        return [str(one) for one in ids] if "user" in self.text else ids

    def items(self, ids: Sequence[Any]) -> Sequence[Any]:
        """Items' ids as in the events."""
        return [str(one) for one in ids] if "item" in self.text else ids


def make_frame(columns: Mapping[str, Sequence[Any] | np.ndarray], library: Library) -> Any:
    """A DataFrame of one of the two libraries. Integers stay integers and text stays text."""
    try:
        if library == "pandas":
            import pandas as pd

            return pd.DataFrame(dict(columns))
        import polars as pl
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            missing_extra(error, "rec") or f"{library} is not installed: pip install {library}", name=error.name
        ) from error
    lists = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in columns.items()}
    return pl.DataFrame([pl.Series(name, values) for name, values in lists.items()])


def ids_column(ids: Sequence[Any]) -> np.ndarray:
    """Ids as an array: int64 if all are integers, else objects; text if both occur, because a column has one type."""
    if all(isinstance(one, int | np.integer) for one in ids):
        return np.array([int(one) for one in ids], dtype=np.int64)
    found = np.empty(len(ids), dtype=object)
    found[:] = [str(one) for one in ids]
    return found


def free_name(name: str, taken: Sequence[str]) -> str:
    """A name for a new column: with an underscore if the events have a column of that name."""
    return f"{name}_" if name in taken else name
