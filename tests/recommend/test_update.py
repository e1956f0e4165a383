"""A recommender grows: new items by their features, further training with new events, nothing lost and nothing that jumps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.cli import main
from prism.overrides import override
from prism.recommend import Recommender
from prism.recommend.events import Histories, Samples, Users
from prism.recommend.task import RecTask, train_rec
from prism.recommend.update import prepare_update, start_tensors, update_order, update_settings
from prism.train import tensors
from prism.train.checkpoint import chosen_by, find_newest_good
from prism.train.order import ReplayOrder
from tests.children import final_tensors, finish, kill_when, reached, same_tensors
from tests.recommend.runs import records_of, start

CLUSTERS, EACH = 4, 8
QUICK: dict[str, Any] = {
    "device": "cpu",
    "report": False,
    "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "dropout": 0.1},
    "data": {"length": 12},
    "batch": {"sequences": 16},
    "optimizer": {"lr": 0.01},
    "validation": {"every": 0},
    "log": {"every": 1},
}


def clustered(events: int = 1200, users: int = 40, first: int = 0) -> pl.DataFrame:
    """Events of users who stay in one cluster of items; a part of users and items is new from event 600 on."""
    random = np.random.default_rng(7)
    user = random.integers(0, users, events)
    place = random.integers(0, EACH, events)
    late = np.arange(events) >= 600
    user = np.where(late, user, user % (users - 4))
    place = np.where(late, place, place % (EACH - 1))
    cluster = user % CLUSTERS
    table = pl.DataFrame(
        {
            "user": user,
            "item": [f"c{c}-{p}" for c, p in zip(cluster, place, strict=True)],
            "time": np.arange(events),
            "kind": [f"kind {c}" for c in cluster],
            "tags": [[f"t{c}", f"t{c % 2} of 2"] for c in cluster],
        }
    )
    return table[first:]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the first half of the events."""
    folder = tmp_path_factory.mktemp("base")
    clustered()[:600].drop("tags").write_csv(folder / "first.csv")
    clustered()[600:].drop("tags").write_csv(folder / "second.csv")
    data = {"length": 12, "cache": str(folder / "cache"), "features": ["kind"]}
    Recommender.fit(folder / "first.csv", folder / "run", steps=40, **{**QUICK, "data": data})
    return folder


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 12), st.floats(0, 2), st.integers(0, 99))
def test_every_epoch_has_all_new_samples_and_other_old_ones(new: int, old: int, replay: float, seed: int) -> None:
    replayed = min(round(replay * new), old)
    order = ReplayOrder(np.arange(new) * 2 + 1, np.arange(old) * 2, replayed, seed)
    drawn = order(np.arange(6 * order.sequences)).reshape(6, -1)
    for epoch in drawn:
        assert sorted(epoch[epoch % 2 == 1]) == list(np.arange(new) * 2 + 1)
        assert len(epoch[epoch % 2 == 0]) == replayed
    if replayed and 6 * replayed >= old:
        assert len(np.unique(drawn[drawn % 2 == 0])) == old, "all old samples have their turn"
    again = ReplayOrder(order.new, order.old, replayed, seed)
    last = np.arange(5 * order.sequences, 6 * order.sequences)
    assert again(last).tolist() == drawn[5].tolist(), "sample i depends on nothing but seed and i"


def test_new_samples_are_those_with_targets_that_were_not_learned_from() -> None:
    samples = Samples(Histories(np.array([0, 7, 9]), np.arange(1, 10)), 2)
    order = update_order(samples, np.array([5, 2]), replay=9.0, seed=0)
    targets = [set(samples.batch(np.array([row])).targets[0].tolist()) - {0} for row in order.new.tolist()]
    assert targets == [{6, 7}] and order.replayed == len(order.old) == 3  # items 1 … 5 and 8, 9 were learned from
    with pytest.raises(ValueError, match="add nothing to learn from"):
        update_order(samples, np.array([7, 2]), 1.0, 0)


def test_growth_keeps_scores_and_moments(base: Path, tmp_path: Path) -> None:
    changes = {
        "out": str(tmp_path / "run"),
        "data": {"source": str(base / "second.csv")},
        "steps": 1,
        "optimizer": {"lr": 0.0},
    }
    chosen = override(update_settings(base / "run"), changes, "changes")
    update = prepare_update(chosen, base / "run")
    task = RecTask(chosen, update.dataset, learned=update.learned)
    held = start_tensors(task, base / "run")
    newest = find_newest_good(base / "run" / "checkpoints", print)
    assert newest is not None
    moments = tensors.read(chosen_by(newest).tensors, "optimizer")
    assert {name.removeprefix("optimizer.") for name in held if name.startswith("optimizer.")} == set(moments)
    grew = 0
    for name, before in moments.items():
        now = held[f"optimizer.{name}"]
        if before.ndim and len(now) > len(before):
            grew += 1
            assert torch.equal(now[: len(before)], before) and not now[len(before) :].any()
        else:
            assert torch.equal(now, before)
    assert grew, "some rows are new"

    old = Recommender.load(base / "run", device="cpu")
    outcome = train_rec(chosen)  # one step at a learning rate of 0
    new = Recommender.load(outcome.run, device="cpu")
    assert new.catalogue.items[: len(old.catalogue)] == list(old.catalogue.items) and len(new.catalogue) > len(
        old.catalogue
    )
    assert old.histories is None and new.recommend(users=[39, 0], k=3).rows.all(), "new users and old ones"
    sequences = [["c0-1", "c0-2"], ["c3-0"]]
    a = old.recommend(sequences=sequences, k=99, filter_seen=False)
    b = new.recommend(sequences=sequences, k=99, filter_seen=False)
    for before, now in zip(a, b, strict=True):
        after = dict(now)
        assert dict(before) == pytest.approx({item: after[item] for item, _ in before}, abs=1e-6)


def test_a_killed_update_resumes_bit_for_bit(base: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 24, "data": {"source": str(base / "second.csv")}, "checkpoint": {"every": 5}}
    calm, hunted = (
        override(update_settings(base / "run"), {**changes, "out": str(tmp_path / name)}, "changes")
        for name in ("calm", "hunted")
    )
    assert finish(start(calm)) == [0]
    for step in (2, 11):
        kill_when(start(hunted, slow=True), reached(hunted.out, step))
    assert finish(start(hunted)) == [0]
    assert records_of(hunted.out) == records_of(calm.out)
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm.out))


def test_an_update_does_not_take_other_events_or_another_base_for_its_own(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder that holds an update resumes only that one: other events would be lost without a word."""
    out, second = tmp_path / "run", tmp_path / "second.csv"
    shutil.copy(base / "second.csv", second)
    words = ["train", "rec", "--update", str(base / "run"), "--out", str(out), "--steps", "3", "--no-report"]
    assert main([*words, "--data.source", str(second)]) == 0
    clustered(1300)[1200:].drop("tags").write_csv(tmp_path / "third.csv")
    copy, other = shutil.copytree(base / "run", tmp_path / "copy"), tmp_path / "other"
    log = (out / "log.jsonl").read_text()
    assert main([*words, "--data.source", str(tmp_path / "third.csv")]) == 2
    assert "was started with different new events" in capsys.readouterr().err
    assert main([*words, "--data.source", str(tmp_path / "gone.csv")]) == 2, "not the file that it was started with"
    capsys.readouterr()
    assert main([*words[:3], str(copy), *words[4:]]) == 0, "a copy of the base is the base"
    shutil.rmtree(copy)
    Recommender.fit(
        clustered()[:600], other, **{**QUICK, "data": {"length": 12, "features": ["kind"]}}, steps=2, seed=1
    )
    capsys.readouterr()
    assert main([*words[:3], str(other), *words[4:]]) == 2
    assert "was started with different base" in capsys.readouterr().err
    assert (out / "log.jsonl").read_text() == log

    second.unlink()
    assert main(["train", "rec", "--out", str(out), "--steps", "4", "--no-report"]) == 0
    said = capsys.readouterr().err
    assert "the update resumes with the events that it was started with" in said and f"{copy} is gone" in said


def test_update_of_a_frame_resumes_with_the_same_frame_only(tmp_path: Path) -> None:
    events, out = clustered(), tmp_path / "run"
    first, other = (Recommender.fit(events[:600], steps=2, seed=seed, **QUICK) for seed in (0, 1))
    first.update(events[600:], out, steps=2)
    assert first.update(events[600:], out, steps=3).histories is not None
    for recommender, new, what in ((first, events[700:], "new events"), (other, events[600:], "base")):
        with pytest.raises(ValueError, match=f"was started with different {what}"):
            recommender.update(new, out, steps=4)


def test_update_from_a_frame_and_on_the_command_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = clustered()
    first = Recommender.fit(
        events[:600], steps=5, features=["kind", "tags"], **QUICK
    )  # no run folder: no optimizer state
    second = first.update(events[600:], tmp_path / "second", epochs=1, replay=0.5)
    assert second.users is not None and len(second.users) == 40 and len(second.catalogue) == CLUSTERS * EACH
    third = Recommender.load(tmp_path / "second", device="cpu").update(clustered(1300)[1200:], steps=2)  # of an update
    assert third.histories is not None and len(third.histories.items) == 1300

    words = [
        "train",
        "rec",
        "--update",
        str(base / "run"),
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "3",
        "--no-report",
    ]
    capsys.readouterr()
    assert main([*words, "--data.source", str(base / "second.csv")]) == 0
    assert "resuming" not in capsys.readouterr().err, "an update that starts resumes nothing"
    assert main(["train", "rec", "--out", str(tmp_path / "run"), "--steps", "4"]) == 0, "it resumes without the rest"
    assert "resuming from step-00000003" in capsys.readouterr().err
    listed = ["recommend", str(tmp_path / "run"), "--users", "39", "--output", str(tmp_path / "none" / "x.csv")]
    assert main(listed) == 2
    assert f"there is no folder {tmp_path / 'none'} to write x.csv in" in capsys.readouterr().err
    assert main(["recommend", str(tmp_path / "run"), "--users", "39", "--k", "2", "--device", "cpu"]) == 0


def test_bad_updates_are_refused_and_leave_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(base / "run"), ["--out", str(tmp_path / "new")]
    source = ["--data.source", str(base / "second.csv")]
    for words, message in (
        ([*source, "--out", run, "--steps", "50"], "the run to update: give another run folder"),
        ([*out], "an update needs new events"),
        ([*out, "--data.source", "gone.csv"], "no file or folder gone.csv"),
        ([*out, *source, "--model.hidden-size", "32"], "model.hidden_size is 32, but the model to update has 16"),
    ):
        assert main(["train", "rec", "--update", run, *words]) != 0
        assert message in capsys.readouterr().err
    assert main(["train", "rec", "--update", "gone", *source, *out]) != 0
    assert "no file or folder gone" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_new_items_rank_by_their_features() -> None:
    """A new item of a user's cluster ranks above new items of other clusters, without having been seen."""
    model = {**QUICK["model"], "id_dropout": 0.2}
    events = clustered()[:600]
    trained = Recommender.fit(events, steps=150, features=["kind", "tags"], **{**QUICK, "model": model})
    known, states = len(trained.catalogue), trained.observe(trained.start(1), [["c1-0", "c1-1"]])
    table = {
        "item": [f"new-{c}" for c in range(CLUSTERS)],
        "kind": [f"kind {c}" for c in range(CLUSTERS)],
        "tags": [[f"t{c}", f"t{c % 2} of 2"] for c in range(CLUSTERS)],
    }
    grown = trained.add_items(table)
    assert len(trained.catalogue) == known and len(grown.catalogue) == known + CLUSTERS
    for cluster in range(CLUSTERS):
        ranked = grown.recommend(sequences=[[f"c{cluster}-{p}" for p in (3, 1)]], k=99).items[0]
        places = [ranked.index(f"new-{c}") for c in range(CLUSTERS)]
        assert min(places) == places[cluster], "the new item of the cluster comes first"
        others = [place for place, item in enumerate(ranked) if not str(item).endswith(f"{cluster}", 0, 2)]
        assert places[cluster] < np.median(others), "and before most items of other clusters"
    before = trained.recommend(states, k=known, filter_seen=False)
    after = grown.recommend(states, k=99, filter_seen=False)
    scores = dict(after[0])
    assert {item: scores[item] for item, _ in before[0]} == pytest.approx(dict(before[0]), abs=1e-6), (
        "states stay valid"
    )
    assert grown.add_items(table).catalogue.items == grown.catalogue.items, "known items are left as they are"


def test_added_items_are_saved_and_bad_tables_are_refused(tmp_path: Path) -> None:
    vectors = {f"c{c}-{p}": [float(c), 1.0] for c in range(CLUSTERS) for p in range(EACH)}
    it = Recommender.fit(clustered()[:600], steps=3, features=["kind"], item_vectors=vectors, **QUICK)
    grown = it.add_items(pl.DataFrame({"item": ["n"], "kind": ["never seen"], "vectors": [[1.0, 2.0]]}))
    assert grown.catalogue.features["kind"].values_of(len(grown.catalogue)) == ["never seen"]
    assert grown.model.get_buffer("given_vectors_0")[-1].tolist() == [1.0, 2.0]
    grown.save(tmp_path / "grown")
    again = Recommender.load(tmp_path / "grown", device="cpu")
    assert again.recommend(sequences=[["n"]], k=5).items == grown.recommend(sequences=[["n"]], k=5).items
    updated = again.update(clustered()[600:], steps=2)
    assert updated.catalogue.index(["n"]).tolist() == [len(it.catalogue) + 1]
    for table, message in (
        ({"kind": ["x"]}, "usual name for the item"),
        ({"item": ["x"], "vectors": ["text"]}, "'vectors' of the table items must hold vectors"),
        ({"item": ["x"], "vectors": [[1.0]]}, "have 1 numbers, those of training 2"),
        ({"item": ["x"], "kind": [["a", "b"]]}, "lists of kind, those of training one value each"),
        ({"item": []}, "there is no item in it"),
        (
            {"item": ["x"], "colour": ["red"]},
            r"give at least one of kind \(a value\), vectors \(a vector of 2 numbers\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            it.add_items(table)
    (tmp_path / "items.csv").write_text("item,colour\nx,red\n")
    with pytest.raises(ValueError, match="has none of the columns that the model knows items by"):
        it.add_items(tmp_path / "items.csv")
    plain = Recommender.fit(clustered()[:600], steps=1, **QUICK)
    with pytest.raises(ValueError, match=r"the model has no features of items.*train it with features of items"):
        plain.add_items({"item": ["x"], "kind": ["a"]})
    with pytest.raises(ValueError, match="trained without features of users"):
        it.start(2, {"country": ["de", "fr"]})


def test_users_without_a_history_file_keep_their_features(tmp_path: Path) -> None:
    people = pl.DataFrame({"user": range(40), "land": ["de", "fr"] * 20, "hobbies": [["s"], ["s", "t"]] * 20})
    it = Recommender.fit(clustered()[:600], steps=5, users=people, user_features=["land", "hobbies"], **QUICK)
    assert isinstance(it.users, Users) and it.histories is not None
    history = it.catalogue.names(it.histories.user(1)[0])
    known = {"land": ["fr"], "hobbies": [["s", "t"]]}
    by_user = it.recommend(users=[1], k=4, max_length=0)
    by_sequence = it.recommend(sequences=[history], k=4, max_length=0, user_features=known)
    states = it.observe(it.start(1, known), [history])
    by_state = it.recommend(states, k=4, exclude=[history])
    np.testing.assert_allclose(by_user.scores, by_sequence.scores, atol=1e-6)
    np.testing.assert_allclose(by_user.scores, by_state.scores, atol=1e-5)
    nobody_knows = it.recommend(sequences=[history], k=4, max_length=0)
    assert np.abs(by_user.scores - nobody_knows.scores).max() > 1e-5
    it.save(tmp_path / "saved")
    again = Recommender.load(tmp_path / "saved", device="cpu").recommend(users=[1], k=4, max_length=0)
    np.testing.assert_array_equal(again.scores, by_user.scores)
    more = people.with_columns(user=pl.col("user") + 4)
    updated = it.update(clustered()[600:], steps=2, users=more)
    assert updated.users is not None and updated.users.features["land"].values_of(39) == ["fr"]
    for given_features, message in (
        ({"age": [1]}, "the features hobbies, land"),
        ({"land": []}, "one entry for each of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            it.start(1, given_features)
