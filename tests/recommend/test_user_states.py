"""A stream of events gives, for every rule, what reading the whole history anew gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prism import rules
from prism.recommend import Recommender, UserStates
from prism.recommend.config import PrismRecConfig
from prism.recommend.events import Catalogue, Feature, Users
from prism.recommend.model import PrismForRecommendation
from prism.recommend.reading import as_histories

ITEMS, LONG = 40, 1000
RULES = [*rules.names(), "prism*2+softmax"]
GROWING = ("softmax", "hstu", "prism*2+softmax")


def recommender(layers: str = "prism", dtype: torch.dtype = torch.float32, **settings: Any) -> Recommender:
    """Weights so large that no part of the model goes unnoticed; scores are then about 1."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_heads": 2, "intermediate_size": 12, "initializer_range": 0.3}
    model = PrismForRecommendation(PrismRecConfig(ITEMS, layers=layers, max_length=20, **{**sizes, **settings}))
    model.describe_items(torch.arange(ITEMS + 1))
    return Recommender(model.to(dtype), Catalogue([f"i{n}" for n in range(1, ITEMS + 1)]))


def sequences(users: int, events: int, seed: int = 1) -> list[list[str]]:
    drawn = torch.randint(1, ITEMS + 1, (users, events), generator=torch.Generator().manual_seed(seed))
    return [[f"i{item}" for item in row] for row in drawn.tolist()]


def anew(it: Recommender, histories: list[list[str]], times: Any = None) -> Tensor:
    """Scores after whole histories, `[n, N]`."""
    return it.model.scores(it.encode(as_histories(histories, times, it.catalogue), max_length=0))[:, 1:]


def streamed(it: Recommender, states: UserStates) -> Tensor:
    return it.model.scores(states.hidden)[:, 1:]


def close(it: Recommender, states: UserStates, histories: list[list[str]], times: Any = None) -> None:
    torch.testing.assert_close(streamed(it, states), anew(it, histories, times), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("layers", RULES)
@torch.no_grad()
def test_streamed_is_read_anew(layers: str) -> None:
    """After 1, 10 and 1000 events: one at a time at both ends, a long list between."""
    # ATLAS's inner optimizer makes a rounding error grow a hundred-thousandfold in a thousand tokens, however they are cut.
    it = recommender(layers, torch.float64 if layers == "atlas" else torch.float32)
    histories = sequences(2, LONG)
    states = it.start(2)
    sizes = [states.nbytes]
    for event in range(10):
        states = it.observe(states, [history[event] for history in histories])
        if event == 0:
            close(it, states, [history[:1] for history in histories])
    close(it, states, [history[:10] for history in histories])
    sizes.append(states.nbytes)
    states = it.observe(states, [history[10:-5] for history in histories])
    for event in range(LONG - 5, LONG):
        states = it.observe(states, [history[event] for history in histories])
    close(it, states, histories)
    sizes.append(states.nbytes)
    assert states.events.tolist() == [LONG, LONG]
    assert (len(set(sizes)) == 1) is (layers not in GROWING)


@pytest.mark.parametrize("layers", ["prism", "softmax"])
@torch.no_grad()
def test_a_thousand_events_one_by_one(layers: str) -> None:
    it, histories = recommender(layers), sequences(2, LONG)
    states = it.start(2)
    for event in range(LONG):
        states = it.observe(states, [history[event] for history in histories])
    close(it, states, histories)


@pytest.mark.parametrize("layers", ["prism", "prism*2+softmax", "mamba2+hstu", "titans"])
@torch.no_grad()
def test_users_go_their_own_ways(layers: str) -> None:
    """Some have an event, some none, some several; picking, joining and copying users changes nothing."""
    it, histories = recommender(layers), sequences(4, 9)
    read = [0, 0, 0, 0]
    states = it.start(4)
    for counts in ([1, 0, 3, 0], [0, 0, 1, 2], [2, 0, 0, 1], [1, 0, 5, 6]):
        events = [history[at : at + count] for history, at, count in zip(histories, read, counts, strict=True)]
        kept = {name: x.clone() for name, x in states.tensors().items()}
        following = it.observe(states, events)
        torch.testing.assert_close(states.tensors(), kept, rtol=0.0, atol=0.0, equal_nan=True)  # a state is a value
        states, read = following, [at + count for at, count in zip(read, counts, strict=True)]
    assert states.events.tolist() == read == [4, 0, 9, 9]
    had = [history[:at] for history, at in zip(histories, read, strict=True)]
    some = [0, 2, 3]
    close(it, states.index_select(some), [had[user] for user in some])
    assert bool((states.hidden[1] == 0).all())

    late, early = it.observe(it.start(1), [histories[0][:2]]), states.index_select([3, 2])
    joined = UserStates.concatenate([late, early, it.start(1)])
    assert joined.events.tolist() == [2, 9, 9, 0]
    following = it.observe(joined, [histories[0][2], histories[1][0], None, histories[1][1]])
    close(it, following, [histories[0][:3], [*had[3], histories[1][0]], had[2], [histories[1][1]]])


@pytest.mark.parametrize("layers", ["prism", "softmax", "hstu", "prism*2+softmax"])
@torch.no_grad()
def test_a_stream_keeps_what_is_known_of_its_users(layers: str) -> None:
    """The features of a user are read before the first event, and no event may push them out of a cache."""
    land = Feature([None, "de", "fr"], np.array([1, 2]))
    it = recommender(layers, torch.float64, user_features={"land": (3, 1)})
    it = Recommender(it.model, it.catalogue, Users(["a", "b"], {"land": land}))
    histories, known = sequences(3, 6), np.array([[1], [2], [0]])
    states = it.start(3, {"land": ["de", "fr", None]})
    for counts in ([1, 0, 1], [1, 0, 0], [1, 0, 0], [0, 2, 1], [2, 4, 4]):
        at = states.events.tolist()
        new = [history[a : a + count] for history, a, count in zip(histories, at, counts, strict=True)]
        states = it.observe(states, new)
        read = [history[:count] for history, count in zip(histories, states.events.tolist(), strict=True)]
        whole = replace(as_histories(read, None, it.catalogue), profiles=known)
        expected, there = it.model.scores(it.encode(whole, max_length=0))[:, 1:], states.events > 0
        torch.testing.assert_close(streamed(it, states)[there], expected[there], rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_ten_thousand_users_in_one_call() -> None:
    it = recommender("prism")
    users = 10_000
    first, second = (sequences(users, 1, seed) for seed in (1, 2))
    states = it.observe(it.start(users), [row[0] for row in first])
    size = states.nbytes
    states = it.observe(states, [row[0] for row in second])
    assert states.nbytes == size and states.events.sum().item() == 2 * users
    some = [0, 77, 9_999]
    close(it, states.index_select(some), [[*first[user], *second[user]] for user in some])
    assert it.recommend(states=states, k=3).rows.shape == (users, 3)


@torch.no_grad()
def test_time_gaps_are_streamed_too() -> None:
    it, histories = recommender("prism", time_gaps=True), sequences(2, 6)
    times = [[5.0, 5.0, 900.0, 1e5, 1e5 + 30, 4e6], [0.0, 86400.0, 90000.0, 90001.0, 3e7, 3e7]]
    states = it.start(2)
    states = it.observe(states, [histories[0][:2], histories[1][:1]], [times[0][:2], times[1][:1]])
    states = it.observe(states, [None, histories[1][1]], [None, times[1][1]])
    states = it.observe(states, [histories[0][2:], histories[1][2:]], [times[0][2:], times[1][2:]])
    close(it, states, histories, times)
    edge = [[0.0, 2.0**26 - 2], [0.0, 1 - 1e-9]]  # float32 has neither: a bucket ends there
    states = it.observe(it.start(2), [history[0] for history in histories], [0.0, 0.0])
    states = it.observe(states, [history[1] for history in histories], [row[1] for row in edge])
    close(it, states, [history[:2] for history in histories], edge)
    moved = [[moment * 7 for moment in row] for row in times]
    assert not bool(torch.isclose(anew(it, histories, times), anew(it, histories, moved), atol=1e-3).all())
    with pytest.raises(ValueError, match="times must be given"):
        it.observe(states, ["i1", "i2"])
    with pytest.raises(ValueError, match="one number for each event"):
        it.observe(states, ["i1", "i2"], [[1.0], []])


@torch.no_grad()
def test_long_lists_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    it, histories = recommender("prism+sliding_window"), [*sequences(1, 50), *sequences(1, 3), []]
    whole = it.observe(it.start(3), histories)
    monkeypatch.setattr("prism.recommend.reading.EVENTS_AT_ONCE", 21)  # 10 events of 2 users, then 21 of one
    shapes = []
    it.model.register_forward_pre_hook(lambda model, inputs: shapes.append(tuple(inputs[0].shape)))
    pieces = it.observe(it.start(3), histories)
    assert shapes == [(2, 10), (1, 21), (1, 19)], "users without events left take no part"
    torch.testing.assert_close(streamed(it, pieces)[:2], streamed(it, whole)[:2], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(anew(it, histories)[:2], streamed(it, whole)[:2], rtol=0.0, atol=1e-5)
    assert pieces.events.tolist() == [50, 3, 0]


@torch.no_grad()
def test_what_grows_is_read_in_pieces_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event meets all before it: 50 more after 10 make 60 of them."""
    it, histories = recommender("prism+softmax"), sequences(2, 60)
    states = it.observe(it.start(2), [history[:10] for history in histories])
    monkeypatch.setattr("prism.recommend.reading.PAIRS_AT_ONCE", 2 * 20 * 60)
    shapes = []
    it.model.register_forward_pre_hook(lambda model, inputs: shapes.append(tuple(inputs[0].shape)))
    states = it.observe(states, [history[10:] for history in histories])
    assert shapes == [(2, 20), (2, 20), (2, 10)]
    close(it, states, histories)


@pytest.mark.parametrize("layers", ["softmax", "prism+hstu+sliding_window"])
@torch.no_grad()
def test_a_cache_is_as_long_as_the_longest_history_on_any_device(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine may not look at lengths: events of some users must not lengthen the caches of all."""
    # float64: these weights amplify the rounding of float32 to 2e-5
    it, histories = recommender(layers, torch.float64), sequences(5, 2)
    expected = it.observe(it.start(5), histories)
    monkeypatch.setattr("prism.engine.memories.attention.values_may_be_read", lambda x: False)
    it = recommender(layers, torch.float64)
    states = it.start(5)
    for event in range(2):
        for user in range(5):
            states = it.observe(states, [histories[user][event] if other == user else None for other in range(5)])
    close(it, states, histories)
    assert states.nbytes == expected.nbytes


@pytest.mark.parametrize("layers", ["prism+softmax", "titans"])
@torch.no_grad()
def test_states_are_saved(layers: str, tmp_path: Any) -> None:
    it, histories = recommender(layers), sequences(3, 8)
    states = it.observe(it.start(3), histories)
    states.save(tmp_path / "states.safetensors")
    again = UserStates.load(tmp_path / "states.safetensors")
    assert {name: x.dtype for name, x in again.tensors().items()} == {
        name: x.dtype for name, x in states.tensors().items()
    }
    following, expected = (it.observe(one, ["i1", None, "i3"]) for one in (again, states))
    assert torch.equal(following.hidden, expected.hidden)
    assert len(again) == 3 and f"{states.nbytes:,}" in repr(states)

    other = recommender(layers)
    with torch.no_grad():
        other.model.model.norm.weight += 1
    other = Recommender(other.model, other.catalogue)
    with pytest.raises(ValueError, match="made by a model with other weights"):
        other.observe(again, ["i1", "i2", "i3"])
    with pytest.raises(ValueError, match="made by a model with another configuration"):
        recommender("linear").recommend(states=again)
    with pytest.raises(ValueError, match="different models"):
        UserStates.concatenate([again, other.start(1)])
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a saved state"):
        UserStates.load(tmp_path / "broken.safetensors")
