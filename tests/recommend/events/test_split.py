"""Histories, splits and samples: nothing is lost, nothing leaks, and every target is the event it says it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.recommend.events.histories import Histories, contexts
from prism.recommend.events.samples import Samples
from prism.recommend.events.split import check_leakage, global_time, leave_one_out


def histories_of(lengths: list[int], seed: int = 0, items: int = 9, times: bool = True) -> Histories:
    """Users with these many events; times ascend within a user and tie now and then."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    moments = [np.sort(random.integers(0, 12, n)).astype(np.float64) for n in lengths]
    return Histories(
        offsets, random.integers(1, items + 1, offsets[-1]), np.concatenate([*moments, []]) if times else None
    )


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6)
property_test = settings(max_examples=40, deadline=None)


@property_test
@given(LENGTHS, st.randoms(use_true_random=False))
def test_take_and_head_are_what_a_loop_would_give(lengths: list[int], random: np.random.Generator) -> None:
    whole = histories_of(lengths)
    chosen = [random.randrange(len(lengths)) for _ in range(5)]
    taken = whole.take(np.array(chosen))
    ends = np.array([random.randint(0, 12) for _ in lengths])
    cut = whole.head(ends)
    assert len(whole) == len(cut) == len(lengths)
    for row, user in enumerate(chosen):
        for got, expected in zip(taken.user(row), whole.user(user), strict=True):
            np.testing.assert_array_equal(got, expected)
    for user, end in enumerate(ends):
        np.testing.assert_array_equal(cut.user(user)[0], whole.user(user)[0][:end])


@property_test
@given(LENGTHS)
def test_leave_one_out(lengths: list[int]) -> None:
    whole = histories_of(lengths)
    if max(lengths) < 3:
        with pytest.raises(ValueError, match="at least 3 events"):
            leave_one_out(whole)
        return
    split = leave_one_out(whole)
    predicted = [user for user, length in enumerate(lengths) if length >= 3]
    assert split.test.users.tolist() == split.validation.users.tolist() == predicted
    assert split.counts["users_too_short_to_predict"] == len(lengths) - len(predicted)
    for row, user in enumerate(predicted):
        items, _ = whole.user(user)
        assert (split.validation.items[row], split.test.items[row]) == (items[-2], items[-1])
        assert (split.validation.ends[row], split.test.ends[row]) == (len(items) - 2, len(items) - 1)
        np.testing.assert_array_equal(split.train.user(user)[0], items[:-2])
    for user in set(range(len(lengths))) - set(predicted):
        np.testing.assert_array_equal(split.train.user(user)[0], whole.user(user)[0])


@property_test
@given(st.lists(st.integers(0, 12), min_size=3, max_size=6), st.integers(1, 11), st.integers(1, 11))
def test_global_time_holds_out_every_later_event(lengths: list[int], valid_from: int, test_from: int) -> None:
    whole = histories_of(lengths, seed=3)
    events = [(u, n, t) for u in range(len(whole)) for n, t in enumerate(whole.user(u)[1].tolist())]
    periods = ((0, valid_from), (valid_from, test_from), (test_from, np.inf))
    expected = [[(u, n) for u, n, t in events if low <= t < high and (n or not low)] for low, high in periods]
    if not all(expected):
        with pytest.raises(ValueError, match=r"before test_from|no event"):
            global_time(whole, valid_from, test_from)
        return
    split = global_time(whole, valid_from, test_from)
    assert len(split.train.items) == len(expected[0])
    for part, places in ((split.validation, expected[1]), (split.test, expected[2])):
        assert list(zip(part.users.tolist(), part.ends.tolist(), strict=True)) == places
        np.testing.assert_array_equal(part.items, [whole.user(u)[0][n] for u, n in places])
    last = global_time(whole, valid_from, test_from, targets="last").test
    assert last.ends.tolist() == [whole.lengths[u] - 1 for u in last.users]


def test_shares_set_the_cuts_of_global_time() -> None:
    times = np.arange(100.0)
    whole = Histories(
        np.arange(0, 101, 10), np.ones(100, np.int64), times[np.argsort(np.arange(100) % 10, kind="stable")]
    )
    whole = replace(whole, times=np.sort(times.reshape(10, 10).T, 1).ravel())
    split = global_time(whole, shares=(0.2, 0.1))
    assert split.counts["train_events"] == 70
    assert (len(split.validation), len(split.test)) == (20, 10)
    assert split.name == "global-time"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"valid_from": 5.0}, "both"),
        ({"valid_from": 5.0, "test_from": 5.0}, "before test_from"),
        ({"shares": (0.5, 0.5)}, "sum below 1"),
        ({"valid_from": -1.0, "test_from": 5.0}, "nothing is left to learn from"),
        ({"valid_from": 50.0, "test_from": 60.0}, "validation period"),
        ({"targets": "first"}, "'all' or 'last'"),
    ],
)
def test_global_time_refuses(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        global_time(histories_of([8, 8, 8]), **arguments)


def test_global_time_cannot_cut_one_moment_by_shares() -> None:
    whole = histories_of([8, 8])
    with pytest.raises(ValueError, match=r"too many events are at 3\.0 .*: give valid_from and test_from"):
        global_time(replace(whole, times=np.full(16, 3.0)))


def test_global_time_needs_times() -> None:
    with pytest.raises(ValueError, match="needs times"):
        global_time(histories_of([5, 5], times=False))


def test_leakage_is_found() -> None:
    split = leave_one_out(histories_of([6, 5, 2], seed=1))
    check_leakage(split)
    with pytest.raises(ValueError, match="validation target of user row 0 is among"):
        check_leakage(replace(split, train=split.histories))
    with pytest.raises(ValueError, match="test target comes before"):
        check_leakage(replace(split, test=split.validation))
    with pytest.raises(ValueError, match="the first events of every"):
        check_leakage(replace(split, train=split.train.take(np.array([1, 0, 2]))))
    whole = split.histories
    assert whole.times is not None
    backwards = Histories(whole.offsets, whole.items, np.where(np.arange(13) == 2, 99, whole.times))
    with pytest.raises(ValueError, match="user row 0 are not sorted"):
        leave_one_out(backwards)
    timed = global_time(whole, 6, 9)
    assert timed.train.times is not None
    with pytest.raises(ValueError, match="at or after the cut"):
        check_leakage(replace(timed, cuts=(float(timed.train.times.max()), 9.0)))


@property_test
@given(LENGTHS, st.integers(1, 5))
def test_windows_make_every_event_but_the_first_a_target_once(lengths: list[int], length: int) -> None:
    whole = histories_of(lengths)
    if max(lengths) < 2:
        with pytest.raises(ValueError, match="2 or more"):
            Samples(whole, length)
        return
    samples = Samples(whole, length)
    batch = samples.batch(np.arange(len(samples)))
    width = min(length, max(lengths) - 1)  # no padding that no sample needs
    assert batch.inputs.shape == batch.targets.shape == (len(samples), width)
    assert samples.targets(np.arange(len(samples))) == int(batch.mask.sum()) == sum(max(0, n - 1) for n in lengths)
    pairs: dict[int, list[tuple[int, int]]] = {user: [] for user in range(len(lengths))}
    for row in reversed(range(len(samples))):  # samples come from the end of a history
        real = batch.mask[row].numpy()
        assert (real[:-1] >= real[1:]).all(), "real events stand first"
        assert not batch.inputs[row][~real].any() and not batch.targets[row][~real].any()
        pairs[int(batch.users[row])] += zip(
            batch.inputs[row][real].tolist(), batch.targets[row][real].tolist(), strict=True
        )
    for user in range(len(lengths)):
        items = whole.user(user)[0].tolist()
        assert pairs[user] == list(pairwise(items))


@property_test
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda n: max(n) > 1), st.integers(1, 5))
def test_gaps_are_times_since_the_event_before(lengths: list[int], length: int) -> None:
    whole = histories_of(lengths, seed=5)
    samples = Samples(whole, length)
    batch = samples.batch(np.arange(len(samples)))
    assert batch.gaps is not None
    assert batch.inputs.shape[1] == min(length, max(lengths) - 1)
    place = {user: whole.lengths[user] - 1 for user in range(len(lengths))}  # last target of the next stretch
    for row, user in enumerate(batch.users.tolist()):
        times = whole.user(user)[1]
        count = int(batch.mask[row].sum())
        start = place[user] - count
        expected = [times[n] - times[n - 1] if n else 0.0 for n in range(start, start + count)]
        assert batch.gaps[row, :count].tolist() == expected
        assert not batch.gaps[row, count:].any()
        place[user] = start


def test_last_keeps_one_stretch_of_each_user() -> None:
    whole = histories_of([7, 1, 0, 3])
    samples = Samples(whole, 4, order="last")
    batch = samples.batch(np.arange(len(samples)))
    assert batch.users.tolist() == [0, 3]
    assert batch.targets[0].tolist() == whole.user(0)[0][-4:].tolist()
    assert batch.targets[1].tolist() == [*whole.user(3)[0][-2:].tolist(), 0, 0]
    assert (batch[:1].tensors()["inputs"] == batch.inputs[:1]).all()
    for wrong in ({"length": 0}, {"length": 4, "order": "first"}):
        with pytest.raises(ValueError, match=r"length|order"):
            Samples(whole, **wrong)


def test_contexts_are_the_events_before_a_target() -> None:
    whole = histories_of([7, 2, 3])
    found = contexts(whole, np.array([0, 2, 1]), np.array([6, 2, 1]), 4)
    assert found.items[0].tolist() == whole.user(0)[0][2:6].tolist()
    assert found.items[1].tolist() == [*whole.user(2)[0][:2].tolist(), 0, 0]
    assert found.mask.sum(1).tolist() == [4, 2, 1]


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (([0, 2], [1], None), "items must have shape"),
        (([1, 2], [1, 1], None), "starts with 0"),
        (([0, 2, 1], [1], None), "ascending"),
        (([0, 1], [1], [1.0, 2.0]), "times must have the shape"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: tuple, sentence: str) -> None:
    offsets, items, times = (None if x is None else np.array(x) for x in arrays)
    with pytest.raises(ValueError, match=sentence):
        Histories(offsets, items, times)
