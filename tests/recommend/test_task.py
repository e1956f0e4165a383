"""What a recommender's run learns from, and with which loss: nothing held out, everything as the settings say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prism.recommend.evaluate import rank_targets
from prism.recommend.events import Dataset, EventRecipe
from prism.recommend.events.recipe import Synthetic
from prism.recommend.events.synthetic import synthetic_dataset
from prism.recommend.learner import make_loss
from prism.recommend.losses import full_softmax
from prism.recommend.settings import LossSettings, RecDataSettings
from prism.recommend.task import RecTask
from prism.train.distributed import World
from tests.recommend.runs import small


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return synthetic_dataset(users=40, items=120, events=900)


@pytest.mark.parametrize("split", ["leave_one_out", "global_time"])
def test_nothing_that_is_held_out_is_learned_from(tmp_path: Path, dataset: Dataset, split: str) -> None:
    """Every (user, item) pair occurs once, so that held-out events can be recognised."""
    task = RecTask(small(tmp_path, data={"split": split}), dataset)
    batch = task.samples(np.arange(len(task.table)), torch.device("cpu"))
    learned = {
        (user, item)
        for name in ("inputs", "targets")
        for user, row in zip(batch.users.tolist(), getattr(batch, name).tolist(), strict=True)
        for item in row
        if item
    }
    counts = np.zeros(dataset.num_items + 1, dtype=np.int64)
    held_out = set()
    for user in range(len(dataset.histories)):
        items, times = dataset.histories.user(user)
        assert times is not None and len(set(items.tolist())) == len(items)
        cut = len(items) - 2 if split == "leave_one_out" else int((times < task.split.cuts[0]).sum())
        held_out |= {(user, item) for item in items[cut:].tolist()}
        np.add.at(counts, items[:cut], 1)
    assert held_out and not learned & held_out
    targets = {
        (user, item) for user, row in zip(batch.users.tolist(), batch.targets.tolist(), strict=True) for item in row
    }
    assert task.weight(np.arange(len(task.table))) == len({pair for pair in targets if pair[1]})
    assert task.counts.tolist() == counts.tolist(), "popularity is part of what is learned"
    model = task.build()
    task.initialize(model)
    assert model.recommender.item_counts.tolist() == counts.tolist()


def test_the_loss_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[str, Any] = {}
    monkeypatch.setattr(
        "prism.recommend.learner.item_loss", lambda *names, **options: heard.update(options, names=names)
    )
    counts = np.arange(8)
    make_loss(LossSettings("gbce", "popularity", count=7, own=True, logq=False, t=0.3), 7, counts)
    assert heard.pop("counts") is counts
    assert heard == {
        "names": ("gbce", 7),
        "negatives": "popularity",
        "count": 7,
        "own": True,
        "logq": False,
        "t": 0.3,
    }


def test_mixtures_of_memories_are_kept_in_balance(tmp_path: Path, dataset: Dataset) -> None:
    """In training the loss has a share for that, for each event."""
    task = RecTask(small(tmp_path, model={"layers": "mom", "dropout": 0.0}), dataset)
    model = task.build()
    task.initialize(model)
    batch = task.samples(np.arange(6), torch.device("cpu"))
    out = model.recommender(batch.inputs)
    plain = full_softmax(out.hidden, model.recommender.item_vectors(), batch.targets)
    assert out.balance_loss is not None and out.balance_loss.item() > 0
    events = task.weight(np.arange(6))
    torch.testing.assert_close(task.loss(model.train(), batch), plain + events * out.balance_loss)
    torch.testing.assert_close(task.loss(model.eval(), batch), plain)


@pytest.mark.parametrize("filter_seen", [True, False])
def test_validation_is_a_ranking_of_all_items(tmp_path: Path, dataset: Dataset, filter_seen: bool) -> None:
    chosen = {"metric": "MRR@50", "filter_seen": filter_seen, "sequences": 11}
    task = RecTask(small(tmp_path, validation=chosen), dataset)
    model = task.build()
    task.initialize(model)
    with torch.autocast("cpu", torch.bfloat16):  # as the loop calls it; ranks are of full precision all the same
        verdict = task.validate(model, World(torch.device("cpu")), 4)
    targets = task.split.validation
    some = targets.take(np.arange(11) * len(targets) // 11)
    ranking = rank_targets(model.recommender, some, dataset.histories, max_length=12, filter_seen=filter_seen)
    expected = ranking.metrics()
    assert verdict.score == expected and verdict.quality == expected["MRR@50"] > 0
    before = torch.get_rng_state()
    copied = task.validate(model, World(torch.device("cpu"), parallel="fsdp"), 4)
    assert copied.score == expected, "a sharded model is put together to be validated"
    assert torch.equal(torch.get_rng_state(), before), "and what training draws next stays what it was"
    assert set(verdict.record) == {f"validation_{name}" for name in ("MRR@50", "HR@10", "NDCG@10", "MRR@10")}


def test_everything_said_of_a_log_reaches_its_recipe() -> None:
    said: dict[str, Any] = {
        "source": "events.csv",
        "format": "csv",
        "user": "u",
        "item": "i",
        "time": None,
        "features": ("f",),
    }
    said |= {"user_features": ("c",), "items": "items.csv", "users": "users.csv", "item_vectors": "v.npy"}
    said |= {"list_separator": ";", "duplicates": "drop", "min_user": 2, "min_item": 3, "synthetic": Synthetic(users=7)}
    assert said.keys() == {field.name for field in fields(EventRecipe)}
    assert not any(getattr(EventRecipe(), name) == value for name, value in said.items())
    assert RecDataSettings(**said).recipe() == EventRecipe(**said)
