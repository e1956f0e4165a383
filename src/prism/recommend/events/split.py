"""Splits of histories into training events and held-out targets.

- `leave_one_out`: every user's last event is the test target, the one before it the validation target. The usual protocol
  of the literature. It leaks time *between* users: one user's training events may be later than another's test event, so
  the model knows what is popular "tomorrow". Within a user nothing leaks.
- `global_time`: nothing at or after a cut in time is learned from, for any user. Stricter, and what a deployed system meets.

Users keep their row in every part: row u of `train` is row u of the full histories (and may be empty).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from prism.recommend.events.histories import Histories

LEAST_EVENTS = 3
"""Leave-one-out needs a context, a validation and a test event: users with fewer events are only trained on."""


@dataclass(frozen=True)
class Targets:
    """M events to predict. Target m is event `ends[m]` of user `users[m]`: its context is events 0 … ends[m]-1 of the
    user's *full* history, so the validation event is known when a test target is predicted. All int64 `[M]`."""

    users: np.ndarray
    ends: np.ndarray
    items: np.ndarray

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: np.ndarray | slice) -> Targets:
        return Targets(self.users[rows], self.ends[rows], self.items[rows])


@dataclass(frozen=True)
class Split:
    """`histories` are complete; `train` is the first part of each, which may be learned from."""

    name: str
    histories: Histories
    train: Histories
    validation: Targets
    test: Targets
    counts: dict[str, int] = field(default_factory=dict)
    cuts: tuple[float, float] | None = None
    """global_time: the start of validation and of test."""


def leave_one_out(histories: Histories) -> Split:
    """Split off the last event of each user for test and the one before it for validation."""
    lengths = histories.lengths
    users = np.flatnonzero(lengths >= LEAST_EVENTS)
    if not len(users):
        raise ValueError(
            f"leave-one-out needs users with at least {LEAST_EVENTS} events; the longest history has "
            f"{lengths.max(initial=0)}"
        )
    ends = lengths.copy()
    ends[users] -= 2
    counts = {"users": len(histories), "users_too_short_to_predict": len(histories) - len(users)}
    return _split(
        "leave-one-out",
        histories,
        ends,
        _targets(histories, users, lengths[users] - 2),
        _targets(histories, users, lengths[users] - 1),
        counts,
    )


def global_time(
    histories: Histories,
    valid_from: float | None = None,
    test_from: float | None = None,
    *,
    shares: tuple[float, float] = (0.1, 0.1),
    targets: Literal["all", "last"] = "all",
) -> Split:
    """Split by time: train before `valid_from`, validate before `test_from`, test after that.

    Every held-out event is predicted from everything before it, as in a system that sees events in real time. Held-out
    events that are their user's first have no context: they are counted, not predicted.

    Args:
        valid_from, test_from: times in the unit of the events; both or neither.
        shares: without times: the fractions of events to validate and to test.
        targets: every held-out event, or only the last of each user in each period.
    """
    times = histories.times
    if times is None:
        raise ValueError(
            "a global-time split needs times, and these events have none: name their column, or use leave_one_out"
        )
    if targets not in ("all", "last"):
        raise ValueError(f"targets must be 'all' or 'last', got {targets!r}")
    if (valid_from is None) != (test_from is None):
        raise ValueError(f"give both valid_from and test_from, or neither, got {valid_from} and {test_from}")
    if valid_from is None or test_from is None:
        if min(shares) <= 0 or sum(shares) >= 1:
            raise ValueError(f"shares must be two positive fractions with a sum below 1, got {shares}")
        valid_from, test_from = np.quantile(times, [1 - sum(shares), 1 - shares[1]], method="higher").tolist()
        if valid_from == test_from:
            raise ValueError(
                f"too many events are at {valid_from} to split there by shares: give valid_from and test_from"
            )
    if not valid_from < test_from:
        raise ValueError(f"valid_from must be before test_from, got {valid_from} and {test_from}")
    cuts = (float(valid_from), float(test_from))
    events_before = [_events_before(histories, cut) for cut in cuts]
    ends = [*events_before, histories.lengths]
    counts = {"users": len(histories)}
    parts = []
    for name, start, stop in zip(("validation", "test"), ends[:-1], ends[1:], strict=True):
        held_out = stop - start
        if targets == "last":
            start, held_out = stop - 1, np.minimum(held_out, 1)
        users = np.repeat(np.arange(len(histories)), held_out)
        first = np.cumsum(held_out) - held_out
        events = np.arange(len(users)) + np.repeat(start - first, held_out)
        known = events > 0
        counts[f"{name}_events_without_context"] = int((~known).sum())
        parts.append(_targets(histories, users[known], events[known]))
    if not ends[0].sum():
        raise ValueError(f"there is no event before valid_from {cuts[0]}: nothing is left to learn from")
    for name, part in zip(("validation", "test"), parts, strict=True):
        if not len(part):
            raise ValueError(f"no event can be predicted in the {name} period: move valid_from or test_from")
    return _split("global-time", histories, ends[0], parts[0], parts[1], counts, cuts)


def check_leakage(split: Split) -> None:
    """Refuse a split in which a target, or anything after it, can be learned from.

    Leave-one-out: every target comes after all training events of its user, and test after validation. Global time:
    also, no training event of any user is at or after the cut.
    """
    full, train = split.histories, split.train
    if len(full) != len(train) or (train.lengths > full.lengths).any():
        raise ValueError("train must hold the first events of every user's history")
    for first, last in train.blocks():
        places = np.arange(train.offsets[first], train.offsets[last])
        same = places + np.repeat((full.offsets - train.offsets)[first:last], train.lengths[first:last])
        if not np.array_equal(full.items[same], train.items[places]) or not _same(
            full.times, train.times, same, places
        ):
            raise ValueError("train must hold the first events of every user's history")
    for first, last in full.blocks() if full.times is not None else ():
        assert full.times is not None
        start, stop = full.offsets[first], full.offsets[last]
        backwards = np.diff(full.times[start:stop]) < 0
        inner = full.offsets[first:last]
        backwards[inner[(inner > start) & (inner < stop)] - start - 1] = False  # from one user to the next
        if backwards.any():
            user = np.searchsorted(full.offsets, start + np.flatnonzero(backwards)[0], "right") - 1
            raise ValueError(f"the events of user row {user} are not sorted by time")
    for name, part in (("validation", split.validation), ("test", split.test)):
        early = part.ends < train.lengths[part.users]
        if early.any():
            user = part.users[early][0]
            raise ValueError(f"a {name} target of user row {user} is among the training events")
    last_validation = np.full(len(full), -1)
    np.maximum.at(last_validation, split.validation.users, split.validation.ends)
    if (split.test.ends <= last_validation[split.test.users]).any():
        raise ValueError("a test target comes before a validation target of the same user")
    if split.cuts is not None:
        if train.times is None or (train.times >= split.cuts[0]).any():
            raise ValueError(f"a training event is at or after the cut {split.cuts[0]}")
        for name, part, cut in (("validation", split.validation, 0), ("test", split.test, 1)):
            assert full.times is not None
            if (full.times[full.offsets[part.users] + part.ends] < split.cuts[cut]).any():
                raise ValueError(f"a {name} target is before the cut {split.cuts[cut]}")


def _events_before(histories: Histories, cut: float) -> np.ndarray:
    """Number of events of each user before a time, int64 `[U]` (events are in order)."""
    assert histories.times is not None
    before = np.concatenate([[0], np.cumsum(histories.times < cut)])
    return before[histories.offsets[1:]] - before[histories.offsets[:-1]]


def _targets(histories: Histories, users: np.ndarray, events: np.ndarray) -> Targets:
    return Targets(users, events, histories.items[histories.offsets[users] + events])


def _split(
    name: str,
    histories: Histories,
    ends: np.ndarray,
    validation: Targets,
    test: Targets,
    counts: dict[str, int],
    cuts: tuple[float, float] | None = None,
) -> Split:
    train = histories.head(ends)
    known = np.zeros(histories.items.max(initial=0) + 1, dtype=bool)
    known[train.items] = True
    counts = {
        **counts,
        "train_events": len(train.items),
        "validation_targets": len(validation),
        "test_targets": len(test),
        "validation_items_never_trained": int((~known[validation.items]).sum()),
        "test_items_never_trained": int((~known[test.items]).sum()),
    }
    split = Split(name, histories, train, validation, test, counts, cuts)
    check_leakage(split)
    return split


def _same(a: np.ndarray | None, b: np.ndarray | None, at_a: np.ndarray, at_b: np.ndarray) -> bool:
    """Whether two arrays, or no arrays, have the same entries at these places."""
    return a is b if a is None or b is None else np.array_equal(a[at_a], b[at_b])
