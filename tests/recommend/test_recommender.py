"""Recommenders in use: for users, for sequences, in batches, saved and opened again; bad input."""

from __future__ import annotations

import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import prism
from prism.recommend import Recommender, UserStates
from prism.recommend.config import PrismRecConfig
from prism.recommend.events import Catalogue, Histories, Users
from prism.recommend.events.synthetic import synthetic_dataset
from prism.recommend.model import PrismForRecommendation

ITEMS = 12
NAMES = [f"i{n}" for n in range(1, ITEMS + 1)]
QUICK: dict[str, Any] = {
    "steps": 6,
    "device": "cpu",
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 1},
    "data": {"length": 10},
    "batch": {"sequences": 8},
    "validation": {"every": 0},
}


def recommender(**settings: Any) -> Recommender:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "initializer_range": 0.4, "max_length": 3}
    model = PrismForRecommendation(PrismRecConfig(ITEMS, layers="prism", **{**sizes, **settings}))
    model.describe_items(torch.tensor([0, *range(ITEMS, 0, -1)]))
    histories = Histories(np.array([0, 4, 4, 6]), np.array([1, 2, 3, 4, 5, 6]))
    return Recommender(model, Catalogue(NAMES), Users(["ann", "bob", "eve"]), histories)


def frame() -> Any:
    """Synthetic events as a table with the usual column names."""
    dataset = synthetic_dataset(users=40, items=120, events=900, seed=3)
    users = np.repeat(np.arange(len(dataset.histories)), dataset.histories.lengths)
    columns = {"user": [f"u{user}" for user in users], "item": dataset.catalogue.names(dataset.histories.items)}
    return pl.DataFrame({**columns, "time": dataset.histories.times})


def test_the_best_items_first() -> None:
    it = recommender()
    found = it.recommend(sequences=[["i1", "i2"], ["i5"]], k=4, filter_seen=False)
    with torch.no_grad():
        scores = it.model.scores(it.model(torch.tensor([[1, 2], [5, 0]])).hidden[torch.arange(2), torch.tensor([1, 0])])
    assert found.rows.tolist() == scores.topk(4).indices.tolist()
    np.testing.assert_allclose(found.scores, scores.topk(4).values.numpy(), rtol=1e-5)
    assert found[0][0].item == NAMES[found.rows[0, 0] - 1] and found[0][0].score == pytest.approx(found.scores[0, 0])
    assert found.items == [[item for item, _ in row] for row in found]
    assert found.items[0][0] in repr(found)


def test_what_was_seen_or_is_not_wanted_is_left_out() -> None:
    it = recommender()
    history = ["i1", "i2", "i3", "i4"]  # of which the model reads three
    everything = it.recommend(sequences=[history], k=ITEMS, filter_seen=False).items[0]
    assert sorted(everything) == sorted(NAMES)
    unseen = it.recommend(sequences=[history], k=ITEMS).items[0]
    assert unseen == [item for item in everything if item not in history]
    fewer = it.recommend(sequences=[history], k=ITEMS, exclude=[["i9", "never heard of"]])
    assert fewer.items[0] == [item for item in unseen if item != "i9"]
    assert fewer.rows.shape == (1, ITEMS) and (fewer.rows[0] == 0).sum() == 5
    state = it.observe(it.start(1), [history[1:]])
    assert it.recommend(states=state, k=ITEMS, exclude=[["i1"]]).items[0] == unseen


def test_users_are_their_histories() -> None:
    it = recommender()
    known = it.recommend(["eve", "ann"], k=3)
    histories = [["i5", "i6"], ["i1", "i2", "i3", "i4"]]
    assert known.items == it.recommend(sequences=histories, k=3).items
    assert known.items == it.recommend(histories, 3).items == it.recommend(users=["eve", "ann"], k=3).items
    states = it.observe(it.start(2), histories)
    for filter_seen in (True, False):
        expected = it.recommend(histories, 3, filter_seen, max_length=0).items
        assert it.recommend(states, 3, filter_seen).items == expected
        assert it.recommend(it.resume(["eve", "ann"]), 3, filter_seen).items == expected
    with pytest.raises(ValueError, match="1 of 1 users are unknown: 'dan'"):
        it.resume(["dan"])
    alone = Recommender(it.model, it.catalogue)
    with pytest.raises(ValueError, match="the model has no histories"):
        alone.recommend(["eve"])


def test_only_the_last_events_are_read_unless_all_are_asked_for() -> None:
    it = recommender()
    history = ["i7", "i1", "i2", "i3"]
    last, everything = (it.recommend(sequences=[history], k=5, max_length=n).scores for n in (None, 0))
    np.testing.assert_allclose(last, it.recommend(sequences=[history[-3:]], exclude=[["i7"]], k=5).scores, rtol=1e-5)
    assert not np.allclose(last, everything)
    streamed = it.recommend(states=it.observe(it.start(1), [history]), k=5, exclude=[history]).scores
    np.testing.assert_allclose(everything, streamed, rtol=1e-4)


def test_someone_new_gets_what_is_popular() -> None:
    it = recommender()
    expected = NAMES[:4]  # counts fall with the number
    assert it.recommend(sequences=[[], ["i1"]], k=4).items[0] == expected
    assert it.recommend(["bob"], k=4).items == [expected]
    assert it.recommend(states=it.start(2), k=4, exclude=[[], ["i1"]]).items == [expected, NAMES[1:5]]
    it.model.item_counts.zero_()
    with pytest.raises(ValueError, match="the model has no item counts"):
        it.recommend(sequences=[[]])


def test_an_unknown_user_gets_what_is_popular_and_the_rest_of_the_batch_their_own() -> None:
    it = recommender()
    with pytest.warns(UserWarning, match="1 of 3 users are unknown and get the most popular items: 'dan'; .*sequences"):
        found = it.recommend(["eve", "dan", "bob"], k=4)
    assert found.items == [it.recommend(["eve"], k=4).items[0], NAMES[:4], NAMES[:4]]
    assert found.fallback is not None and found.fallback.tolist() == [False, True, True], "bob has no events"
    assert list(found.keys) == ["eve", "dan", "bob"]
    with pytest.raises(ValueError, match=r"1 of 2 users are unknown: 'dan'; .* give the history"):
        it.recommend(["eve", "dan"], unknown="error")
    with pytest.warns(UserWarning, match="2 of 2 users are unknown"):
        assert it.recommend(["i1", "i2"], k=2).items == [NAMES[:2]] * 2


def test_unknown_items_are_left_out_or_refused() -> None:
    it = recommender()
    expected = it.recommend(sequences=[["i1", "i3"]])
    with pytest.warns(UserWarning, match="1 of 3 events are dropped: the model does not know 'new'"):
        found = it.recommend(sequences=[["i1", "new", "i3"]])
    assert found.items == expected.items
    with pytest.warns(UserWarning, match="2 of 2 events"):
        assert it.recommend(sequences=[["new", "newer"]], k=2).items == [NAMES[:2]]
    with pytest.warns(UserWarning, match="'new'"):
        states = it.observe(it.start(2), ["new", "i2"])
    assert states.events.tolist() == [0, 1]
    with pytest.raises(ValueError, match="1 of 2 items are not in the catalogue: 'new'"):
        it.observe(states, ["new", "i2"], unknown="error")
    with pytest.raises(ValueError, match="not in the catalogue"):
        it.recommend(sequences=[["new"]], unknown="error")


@pytest.mark.parametrize("flat", [["i1", "i2"], [["i1"], "i2"], (1, 2), np.array([1, 2]), "i1"])
def test_a_flat_list_of_items_is_no_list_of_histories(flat: Any) -> None:
    with pytest.raises(ValueError, match=r"sequences must be a list"):
        recommender().recommend(sequences=flat)


def test_numbers_are_items_too() -> None:
    it = recommender()
    numbered = Recommender(it.model, Catalogue([10 * n for n in range(1, ITEMS + 1)]))
    events: Any = np.array([[10, 20], [30, 40]])
    expected = it.recommend(sequences=[["i1", "i2"], ["i3", "i4"]])
    assert numbered.recommend(sequences=events).rows.tolist() == expected.rows.tolist()
    states = numbered.observe(numbered.observe(numbered.start(2), events[:, 0]), events[:, 1])
    streamed = numbered.recommend(states=states, exclude=events)
    assert streamed.rows.tolist() == expected.rows.tolist()


def test_sequences_come_in_any_shape() -> None:
    it = recommender()
    numbered = Recommender(it.model, Catalogue(list(range(1, ITEMS + 1))))
    expected = numbered.recommend(sequences=[[1, 2], [3, 4]], k=3)
    tensor = torch.tensor([[1, 2], [3, 4]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sequences in (
            tensor,
            list(tensor),
            tensor.numpy(),
            [(1, 2), (3, 4)],
            [pl.Series([1, 2]), pl.Series([3, 4])],
        ):
            assert numbered.recommend(sequences=sequences, k=3).items == expected.items
            assert numbered.recommend(sequences, k=3).items == expected.items
        states = numbered.observe(numbered.observe(numbered.start(2), tensor[:, 0]), tensor[:, 1])
    assert numbered.recommend(states, 3, exclude=[[1, 2], [3, 4]]).items == expected.items
    none = it.recommend([], k=3)
    assert len(none) == 0 and none.rows.shape == (0, 3) and none.items == []
    assert (
        it.recommend(["ann"], ITEMS, False, exclude=["i9"]).items
        == it.recommend(["ann"], ITEMS, False, exclude=[["i9"]]).items
    )


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    it = recommender()
    histories = [NAMES[:n] for n in (0, 5, 1, 3, 2, 8)]
    whole = it.recommend(sequences=histories, max_length=0)
    monkeypatch.setattr("prism.recommend.reading.EVENTS_AT_ONCE", 6)
    monkeypatch.setattr("prism.recommend.top_items.USERS_AT_ONCE", 2)
    monkeypatch.setattr("prism.recommend.top_items.SLICE", 14)
    parts = it.recommend(sequences=histories, max_length=0)
    assert parts.rows.tolist() == whole.rows.tolist()
    np.testing.assert_allclose(parts.scores, whole.scores, rtol=1e-4, atol=1e-6)


def test_a_recommender_is_saved_with_or_without_its_users_events(tmp_path: Path) -> None:
    it = recommender()
    it.save(tmp_path / "whole")
    it.save(tmp_path / "whole")  # again, in its place
    again = Recommender.load(tmp_path / "whole", device="cpu")
    assert again.recommend(["ann", "bob"]).items == it.recommend(["ann", "bob"]).items
    it.save(tmp_path / "bare", histories=False)
    bare = Recommender.load(tmp_path / "bare", device="cpu")
    assert bare.recommend(sequences=[["i5", "i6"]]).items == it.recommend(["eve"]).items
    with pytest.raises(ValueError, match="no histories"):
        bare.recommend(["ann"])
    (tmp_path / "bare" / "items.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no items\.json"):
        Recommender.load(tmp_path / "bare")
    assert prism.Recommender is Recommender


def test_bad_input_is_named() -> None:
    it = recommender()
    states = it.start(2)
    for call, words in (
        (lambda: it.recommend(), "exactly one of users"),
        (lambda: it.recommend(["ann"], sequences=[["i1"]]), "exactly one of users"),
        (lambda: it.recommend(["ann"], k=0), "k must be an integer of at least 1"),
        (lambda: it.recommend(["ann"], max_length=-1), "max_length must be"),
        (lambda: it.recommend(["ann"], max_length="3"), "integer of at least 1, or 0 for all events, got '3'"),
        (lambda: Recommender.fit(frame(), features="item"), "features must be a list, got 'item'"),
        (lambda: Recommender.fit(frame(), user_features="item"), "user_features must be a list, got 'item'"),
        (lambda: it.recommend(["ann"], exclude=[]), "one list of items for each of the 1 rows"),
        (lambda: it.recommend("ann"), "users must be a list, got 'ann'"),
        (lambda: it.recommend(users=3), "users must be a list, got 3"),
        (lambda: it.recommend(["ann"], k=1.5), "k must be an integer of at least 1, got 1.5"),
        (lambda: it.recommend(states=(1, 2)), "must be UserStates from start or observe, got tuple"),
        (lambda: it.observe(states, "ab"), "items must be a list, got 'ab'"),
        (lambda: it.recommend([["i1"], "i2"]), "users must be text or integers, got list"),
        (lambda: it.recommend(sequences=[[["i1"]]]), "items must be text or integers, got list"),
        (lambda: it.recommend(sequences=[["i1"]], unknown="ignore"), "unknown must be"),
        (lambda: it.observe(states, ["i1", None], [datetime(2020, 1, 1), None]), "seconds since 1970"),
        (lambda: it.recommend(["ann"], k=True), "k must be an integer of at least 1, got True"),
        (lambda: it.recommend(["ann"], diversify=1.5), "diversify must be a number from 0 to 1, got 1.5"),
        (lambda: it.recommend(["ann"], allowed="i1"), "allowed must be a list of items, got 'i1'"),
        (lambda: it.recommend(["ann"], allowed=["?"]), "at least one item that the model knows"),
        (lambda: it.recommend(["ann"], where={"kind": "a"}), "where has no feature 'kind': the items have none"),
        (lambda: it.similar_items("?"), "1 of 1 items are unknown"),
        (lambda: it.similar_items("i1", k=0), "k must be an integer of at least 1"),
        (lambda: it.start(0), "users must be an integer of at least 1, got 0"),
        (lambda: it.start("ann"), "users must be an integer of at least 1, got 'ann'"),
        (lambda: it.observe(states, ["i1"]), "one entry for each of the 2 users"),
        (lambda: it.observe(states, ["i1", "i2"], [1.0, float("nan")]), "finite"),
        (lambda: Recommender(it.model, Catalogue(["a"])), "the catalogue has 1 items, but the model 12"),
        (
            lambda: Recommender(it.model, it.catalogue, Users(["a"]), it.histories),
            "must have the same length, got 1 and 3",
        ),
        (lambda: UserStates.concatenate([]), "must not be empty"),
        (lambda: Recommender.fit("events.csv", data={"source": "other.csv"}), "leave it out"),
        (
            lambda: Recommender.fit("events.csv", feature="name"),
            r"no argument feature \(did you mean features\?\): name columns",
        ),
        (lambda: Recommender.fit("events.csv", epoch=3), r"no argument epoch \(did you mean epochs\?\)"),
        (
            lambda: Recommender.fit("events.csv", column="name"),
            "name columns with user, item, time, features, user_features; all else",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
