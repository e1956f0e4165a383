"""Read events with a model: whole histories from the start, or new events from a state.

Events come as people give them (ids, one or several per user, with or without times) and become arrays of rows of the
catalogue. They are read in batches that bound the memory and hold only users that have events left.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from prism import rules
from prism.models import PrismCache
from prism.models.loading import stable_fingerprint
from prism.recommend.arguments import check_count
from prism.recommend.events import Catalogue, Histories
from prism.recommend.events.histories import contexts
from prism.recommend.events.ids import as_list
from prism.recommend.model import PrismForRecommendation
from prism.recommend.ranking import EVENTS_AT_ONCE
from prism.recommend.seen import SeenItems
from prism.recommend.states import UserStates

Unknown = Literal["skip", "error"]
PAIRS_AT_ONCE = 2**26
"""Most pairs of an event and an earlier one at once, for models that attend to all earlier events."""


def as_histories(
    sequences: Sequence[Any], times: Sequence[Any] | None, catalogue: Catalogue, unknown: Unknown = "skip"
) -> Histories:
    """Convert sequences of item ids to histories.

    Args:
        sequences: for each user a list of ids, one id, or None for no event.
        times: of the same shape. None: no times.
        unknown: drop items that the catalogue does not have, with a warning ("skip"), or refuse them ("error").
    """
    if unknown not in ("skip", "error"):
        raise ValueError(f"unknown must be 'skip' or 'error', got {unknown!r}")
    rows = [as_list(events) for events in sequences]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    asked = [item for row in rows for item in row]
    found = catalogue.rows(asked)
    event_times = None if times is None else _times_array(times, lengths)
    known = found > 0
    if not known.all():
        lost = [item for item, is_known in zip(asked, known, strict=True) if not is_known]
        shown = ", ".join(repr(item) for item in lost[:5]) + (" …" if len(lost) > 5 else "")
        if unknown == "error":
            raise ValueError(f"{len(lost)} of {len(asked)} items are not in the catalogue: {shown}")
        warnings.warn(f"{len(lost)} of {len(asked)} events are dropped: the model does not know {shown}", stacklevel=4)
    kept = np.concatenate([[0], np.cumsum(known)])
    offsets = kept[np.concatenate([[0], np.cumsum(lengths)])]
    return Histories(offsets, found[known], None if event_times is None else event_times[known])


def _times_array(times: Sequence[Any], lengths: np.ndarray) -> np.ndarray:
    rows = [as_list(event_times) for event_times in times]
    if [len(row) for row in rows] != lengths.tolist():
        raise ValueError("times must have the shape of the events: one number for each event")
    try:
        event_times = np.array([time for row in rows for time in row], dtype=np.float64)
    except (TypeError, ValueError):
        event_times = np.array([np.nan])
    if not np.isfinite(event_times).all():
        raise ValueError(
            "times must be finite numbers, in the unit of the training events (for dates: seconds since 1970, UTC)"
        )
    return event_times


def encode(model: PrismForRecommendation, histories: Histories, max_length: int | None) -> Tensor:
    """The model's output after each user's last event, `[U, D]`, zeros without events; see `Recommender.encode`."""
    if max_length is not None:
        check_count("max_length", max_length, zero="all events")
    longest = int(histories.lengths.max(initial=0))
    limit = model.config.max_length if max_length is None else max_length or max(longest, 1)
    read = np.minimum(histories.lengths, limit)
    device = model.item_counts.device
    hidden = without_events(model, len(histories))
    order = np.argsort(read, kind="stable")
    order = order[read[order] > 0]
    while len(order):  # the longest first: if memory is too small, that fails at once
        rows = order[-max(1, EVENTS_AT_ONCE // int(read[order[-1]])) :]
        order = order[: -len(rows)]
        events = contexts(histories, rows, histories.lengths[rows], limit)
        gaps = torch.from_numpy(_require_times(events.gaps)).to(device) if model.config.time_gaps else None
        lengths = torch.from_numpy(read[rows]).to(device)
        profiles = None if events.profiles is None else torch.from_numpy(events.profiles).to(device)
        last = model.last_hidden(torch.from_numpy(events.items).to(device), lengths, gaps, profiles)
        hidden[torch.from_numpy(rows).to(device)] = last.to(hidden.dtype)
    return hidden


def initial_state(model: PrismForRecommendation, profiles: np.ndarray | None = None) -> UserStates:
    """The state of one user before the first event: what the model returns for padding alone.

    Args:
        profiles: `[n, W]`, codes of the features of n users, whose states are returned instead.
    """
    users = 1 if profiles is None else len(profiles)
    zero = torch.zeros(users, 1, dtype=torch.int64, device=model.item_counts.device)
    known = None if profiles is None else torch.from_numpy(profiles).to(zero.device)
    with torch.no_grad():
        gaps = zero.float() if model.config.time_gaps else None
        out = model(zero, zero.bool(), gaps, use_cache=True, profiles=known)
    assert out.past_key_values is not None
    never = torch.full((users,), torch.nan, dtype=torch.float64, device=zero.device)
    layers, hidden = tuple(out.past_key_values.states), without_events(model, users)
    return UserStates(layers, hidden, zero[:, 0], never, stable_fingerprint(model))


def without_events(model: PrismForRecommendation, users: int) -> Tensor:
    """Output for users without events: zeros `[users, D]`, in float32 or better for a model of any precision."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    return torch.zeros(users, model.config.hidden_size, dtype=dtype, device=model.item_counts.device)


def advance(model: PrismForRecommendation, states: UserStates, histories: Histories) -> UserStates:
    """Advance the states by the events of their users."""
    lengths, seen = histories.lengths, states.seen.add(histories)
    states = replace(states, seen=SeenItems.none(len(states)))  # added once at the end, not copied with every batch
    read = np.zeros_like(lengths)
    most = EVENTS_AT_ONCE
    if not model.config.constant_state:
        most = min(most, PAIRS_AT_ONCE // (int(states.events.max()) + int(lengths.max(initial=1))))
    while len(users := np.flatnonzero(read < lengths)):
        ends = np.minimum(lengths, read + max(1, most // len(users)))
        everyone = len(users) == len(states)
        moved = _advance_batch(
            model,
            states if everyone else states.index_select(users.tolist()),
            histories,
            histories.offsets[users] + read[users],
            (ends - read)[users],
        )
        states = moved if everyone else _put(states, users, moved)
        read = ends
    return replace(_trimmed(model, states), seen=seen)


def _advance_batch(
    model: PrismForRecommendation, states: UserStates, histories: Histories, starts: np.ndarray, counts: np.ndarray
) -> UserStates:
    """Read `counts[u]` ≥ 1 events of every user, from place `starts[u]` of the flat arrays."""
    device = states.device
    steps = np.arange(counts.max())
    mask = steps < counts[:, None]
    places = np.where(mask, starts[:, None] + steps, 0)
    inputs = torch.from_numpy(np.where(mask, histories.items[places], 0)).to(device)
    real = torch.from_numpy(mask).to(device)
    last, row = torch.from_numpy(counts - 1).to(device), torch.arange(len(states), device=device)
    gaps, last_time = None, states.last_time
    if model.config.time_gaps:
        event_times = torch.from_numpy(_require_times(histories.times)[places]).to(device)
        first = torch.where(last_time.isnan(), event_times[:, 0], last_time)
        gaps = (event_times - torch.cat([first[:, None], event_times[:, :-1]], 1)).masked_fill(~real, 0.0)
        gaps = gaps.float()  # the dtype of the histories' gaps: a rounding difference may be another bucket
        last_time = event_times[row, last]
    cache = PrismCache()
    cache.update(list(states.layers), 0)
    out = model(inputs, real, gaps, cache, use_cache=True)
    assert out.hidden is not None and out.past_key_values is not None
    hidden = out.hidden[row, last].to(states.hidden.dtype)
    return UserStates(tuple(out.past_key_values.states), hidden, states.events + real.sum(1), last_time, states.model)


def _put(states: UserStates, users: np.ndarray, moved: UserStates) -> UserStates:
    """Replace the states of `users`, int `[m]`."""
    rows = np.arange(len(states))
    rows[users] = len(states) + np.arange(len(users))
    return UserStates.concatenate([states, moved]).index_select(rows.tolist())


def _trimmed(model: PrismForRecommendation, states: UserStates) -> UserStates:
    """Trim growing caches to as many slots as the longest history has events, and one for what is known of the user.

    The engine leaves empty slots in front if finding them would synchronise the device. Without trimming, calls for a few
    users each would lengthen every user's cache.
    """
    if model.config.constant_state:
        return states
    longest = int(states.events.max()) + bool(model.config.user_features)
    layers = [
        layer if rules.get(spec.rule).constant_state else layer.map(lambda x: x[:, -longest:] if x.ndim > 1 else x)
        for spec, layer in zip(model.config.layer_plan, states.layers, strict=True)
    ]
    return replace(states, layers=tuple(layers))


def _require_times(times: np.ndarray | None) -> np.ndarray:
    if times is None:
        raise ValueError("times must be given: the model was trained with time gaps")
    return times
