"""How histories and new events are read: whole histories anew, or from a state on.

Both take as many events at a time as memory is meant to hold, and no more users than have events left.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prism import rules
from prism.models import PrismCache, PrismForRecommendation
from prism.models.loading import fingerprint
from prism.recommend.evaluate import EVENTS_AT_ONCE
from prism.recommend.events import Catalogue, Histories
from prism.recommend.events.samples import contexts
from prism.recommend.states import UserStates

# Events as people give them (ids, one a user or several, with or without times) as arrays of the catalogue's rows.

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


PAIRS_AT_ONCE = 2**26
"""How many pairs of an event and one before it, where the model keeps and meets them all."""


def encode(model: PrismForRecommendation, histories: Histories, max_length: int | None) -> Tensor:
    """`[U, D]` after each user's last event, zeros without events; see `Recommender.encode`."""
    if max_length is not None and max_length < 0:
        raise ValueError(f"max_length must be at least 1, or 0 for all, got {max_length}")
    longest = int(histories.lengths.max(initial=0))
    limit = model.config.max_length if max_length is None else max_length or max(longest, 1)
    read = np.minimum(histories.lengths, limit)
    device = model.item_counts.device
    hidden = nothing(model, len(histories))
    order = np.argsort(read, kind="stable")
    order = order[read[order] > 0]
    while len(order):  # the longest first, so that what memory there must be is found out at once
        rows = order[-max(1, EVENTS_AT_ONCE // int(read[order[-1]])) :]
        order = order[: -len(rows)]
        events = contexts(histories, rows, histories.lengths[rows], limit)
        gaps = torch.from_numpy(_needed(events.gaps)).to(device) if model.config.time_gaps else None
        lengths = torch.from_numpy(read[rows]).to(device)
        last = model.last_hidden(torch.from_numpy(events.items).to(device), lengths, gaps)
        hidden[torch.from_numpy(rows).to(device)] = last.to(hidden.dtype)
    return hidden


def blank(model: PrismForRecommendation) -> UserStates:
    """One user before the first event: what a model makes of nothing but padding."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.item_counts.device)
    with torch.no_grad():
        out = model(zero, zero.bool(), zero.float() if model.config.time_gaps else None, use_cache=True)
    assert out.past_key_values is not None
    never = torch.full((1,), torch.nan, dtype=torch.float64, device=zero.device)
    return UserStates(tuple(out.past_key_values.states), nothing(model, 1), zero[0], never, fingerprint(model))


def nothing(model: PrismForRecommendation, users: int) -> Tensor:
    """What is expected of users without events, `[users, D]`; in full precision, whatever the model's."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    return torch.zeros(users, model.config.hidden_size, dtype=dtype, device=model.item_counts.device)


def read_on(model: PrismForRecommendation, states: UserStates, histories: Histories) -> UserStates:
    """The states after these events of their users."""
    lengths = histories.lengths
    read = np.zeros_like(lengths)
    most = EVENTS_AT_ONCE
    if not model.config.constant_state:
        most = min(most, PAIRS_AT_ONCE // (int(states.events.max()) + int(lengths.max(initial=1))))
    while len(users := np.flatnonzero(read < lengths)):
        ends = np.minimum(lengths, read + max(1, most // len(users)))
        everyone = len(users) == len(states)
        moved = _advance(
            model,
            states if everyone else states.index_select(users.tolist()),
            histories,
            histories.offsets[users] + read[users],
            (ends - read)[users],
        )
        states = moved if everyone else _put(states, users, moved)
        read = ends
    return _fitted(model, states)


def _advance(
    model: PrismForRecommendation, states: UserStates, histories: Histories, starts: np.ndarray, counts: np.ndarray
) -> UserStates:
    """Read for every user `counts[u]` ≥ 1 events from place `starts[u]` of the flat arrays on."""
    device = states.device
    steps = np.arange(counts.max())
    mask = steps < counts[:, None]
    places = np.where(mask, starts[:, None] + steps, 0)
    inputs = torch.from_numpy(np.where(mask, histories.items[places], 0)).to(device)
    real = torch.from_numpy(mask).to(device)
    last, row = torch.from_numpy(counts - 1).to(device), torch.arange(len(states), device=device)
    gaps, last_time = None, states.last_time
    if model.config.time_gaps:
        moments = torch.from_numpy(_needed(histories.times)[places]).to(device)
        first = torch.where(last_time.isnan(), moments[:, 0], last_time)
        gaps = (moments - torch.cat([first[:, None], moments[:, :-1]], 1)).masked_fill(~real, 0.0)
        gaps = gaps.float()  # as histories' are: half a second more or less may be another bucket
        last_time = moments[row, last]
    cache = PrismCache()
    cache.update(list(states.layers), 0)
    out = model(inputs, real, gaps, cache, use_cache=True)
    assert out.hidden is not None and out.past_key_values is not None
    hidden = out.hidden[row, last].to(states.hidden.dtype)
    return UserStates(tuple(out.past_key_values.states), hidden, states.events + real.sum(1), last_time, states.model)


def _put(states: UserStates, users: np.ndarray, moved: UserStates) -> UserStates:
    """`states` with those of `users`, int `[m]`, replaced."""
    rows = np.arange(len(states))
    rows[users] = len(states) + np.arange(len(users))
    return UserStates.concatenate([states, moved]).index_select(rows.tolist())


def _fitted(model: PrismForRecommendation, states: UserStates) -> UserStates:
    """Caches that grow have as many slots as the longest history has events. (The engine leaves empty ones in front where
    looking would mean to wait for a device: calls for a few users each would then lengthen everybody's.)"""
    if model.config.constant_state:
        return states
    longest = int(states.events.max())
    layers = [
        layer if rules.get(spec.rule).constant_state else layer.map(lambda x: x[:, -longest:] if x.ndim > 1 else x)
        for spec, layer in zip(model.config.layer_plan, states.layers, strict=True)
    ]
    return replace(states, layers=tuple(layers))


def _needed(times: np.ndarray | None) -> np.ndarray:
    if times is None:
        raise ValueError("times must be given: the model was trained with time gaps")
    return times
