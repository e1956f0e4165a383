"""Events as people give them (ids, one a user or several, with or without times) as arrays of the catalogue's rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

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
    rows = [_several(events) for events in sequences]
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


def _several(events: Any) -> Sequence[Any]:
    if events is None:
        return ()
    if isinstance(events, str) or not isinstance(events, Iterable):
        return (events,)
    return events.tolist() if isinstance(events, np.ndarray) else list(events)


def _moments(times: Sequence[Any], lengths: np.ndarray) -> np.ndarray:
    rows = [_several(moments) for moments in times]
    if [len(row) for row in rows] != lengths.tolist():
        raise ValueError("times must have one number for each event: they are shaped like the events")
    moments = np.array([moment for row in rows for moment in row], dtype=np.float64)
    if not np.isfinite(moments).all():
        raise ValueError("times must be finite numbers, on the log's clock")
    return moments
