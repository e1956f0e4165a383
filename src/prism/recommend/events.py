"""Events as people give them (ids, one a user or several, with or without times) as arrays of the catalogue's rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from prism.data.interactions import Catalogue, Histories

Unknown = Literal["skip", "error"]


def as_histories(
    sequences: Sequence[Any], times: Sequence[Any] | None, catalogue: Catalogue, unknown: Unknown = "skip"
) -> Histories:
    """Sequences of items' ids as histories.

    Args:
        sequences: for each user a list of ids, or one id, or None for no event.
        times: of the same shape; None: no times.
        unknown: items that the catalogue does not have are left out, with a warning ("skip"), or refused ("error").
    """
    if unknown not in ("skip", "error"):
        raise ValueError(f"unknown must be 'skip' or 'error', got {unknown!r}")
    rows = [several(events) for events in sequences]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    asked = [item for row in rows for item in row]
    found = catalogue.rows(asked)
    moments = None if times is None else _moments(times, lengths)
    known = found > 0
    if not known.all():
        lost = [item for item, is_known in zip(asked, known, strict=True) if not is_known]
        shown = ", ".join(repr(item) for item in lost[:5]) + (" …" if len(lost) > 5 else "")
        if unknown == "error":
            raise ValueError(f"{len(lost)} of {len(asked)} items are not in the catalogue: {shown}")
        warnings.warn(f"{len(lost)} of {len(asked)} events are left out, the model does not know {shown}", stacklevel=4)
    kept = np.concatenate([[0], np.cumsum(known)])
    offsets = kept[np.concatenate([[0], np.cumsum(lengths)])]
    return Histories(offsets, found[known], None if moments is None else moments[known])


def is_several(events: Any) -> bool:
    """Whether this is a list, an array, a tensor, a series … of ids, and not one id."""
    return isinstance(events, Iterable) and not isinstance(events, str) and getattr(events, "ndim", 1) > 0


def several(events: Any) -> Sequence[Any]:
    """Ids as a list: of several, of one, or of none (None)."""
    if events is None:
        return ()
    if not is_several(events):
        return (events.item() if isinstance(events, (np.ndarray, Tensor)) else events,)
    return events.tolist() if isinstance(events, (np.ndarray, Tensor)) else list(events)


def _moments(times: Sequence[Any], lengths: np.ndarray) -> np.ndarray:
    rows = [several(moments) for moments in times]
    if [len(row) for row in rows] != lengths.tolist():
        raise ValueError("times must have one number for each event: they are shaped like the events")
    try:
        moments = np.array([moment for row in rows for moment in row], dtype=np.float64)
    except (TypeError, ValueError):
        moments = np.array([np.nan])
    if not np.isfinite(moments).all():
        raise ValueError("times must be finite numbers, on the log's clock (of dates: seconds since 1970, UTC)")
    return moments
