"""Training recommenders: they learn, resume bit for bit after a kill, stop early at the best model, and can be opened."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prism.recommend.events import Catalogue, Dataset, Histories, Samples, Users
from prism.recommend.task import RecTask, SampleTable, train_rec
from prism.train.checkpoint import checkpoint_names
from prism.train.order import Order, sequence_of
from tests.children import final_tensors, finish, kill_when, reached, same_tensors
from tests.recommend.runs import records_of, small, start


def curve(run: Path) -> list[float]:
    return [record["loss"] for record in records_of(run) if "loss" in record]


@pytest.mark.parametrize(
    ("layers", "loss"),
    [
        ("prism", {"name": "full_softmax"}),
        ("softmax", {"name": "sampled_softmax", "negatives": "popularity", "count": 30}),
        ("gated_delta+softmax", {"name": "gbce", "count": 30}),
        ("prism", {"name": "bce", "negatives": "in_batch", "count": 30, "own": True}),
    ],
)
def test_a_run_learns_and_leaves_what_it_promises(tmp_path: Path, layers: str, loss: dict[str, Any]) -> None:
    model = {"layers": layers, "time_gaps": layers == "prism"}
    outcome = train_rec(small(tmp_path, steps=60, model=model, loss=loss, data={"features": []}))
    losses = curve(outcome.run)
    assert len(losses) == 60 and np.mean(losses[-5:]) < 0.93 * np.mean(losses[:5])
    if "softmax" in loss["name"]:  # binary losses first learn that most answers are no: slow to show in a ranking
        assert outcome.score["HR@10"] > 2 * 10 / 120, "twice as good as chance"
    assert outcome.best_step is None
    names = {".lock", "config.json", "items.json", "users.json", "log.jsonl", "checkpoints", "model"}
    assert {path.name for path in outcome.run.iterdir()} == names
    files = {
        "config.json",
        "model.safetensors",
        "items.json",
        "users.json",
        "training.json",
        "README.md",
        "manifest.json",
    }
    assert {path.name for path in outcome.model.iterdir()} == files
    card = (outcome.model / "README.md").read_text()
    assert "NDCG@10" in card and "leave-one-out" in card and loss["name"] in card

    from transformers import AutoModel

    opened = AutoModel.from_pretrained(outcome.model)
    task = RecTask(small(tmp_path, model=model), _dataset(tmp_path))
    assert torch.equal(opened.item_counts, torch.from_numpy(task.counts))
    items = torch.tensor([[3, 1, 4], [1, 5, 9]])
    gaps = torch.zeros(items.shape) if layers == "prism" else None
    assert opened.scores(opened(items, gaps=gaps).hidden).isfinite()[..., 1:].all()


def _dataset(root: Path) -> Dataset:
    from prism.recommend.events import prepare_dataset

    return prepare_dataset(small(root).data.recipe(), root / "cache")


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, processes: int) -> None:
    """With dropout, negatives that are drawn and patience that is counted: all must resume where they were."""
    changes: dict[str, Any] = {
        "parallel": "none" if processes == 1 else "ddp",
        "loss": {"name": "sampled_softmax", "count": 20},
        "validation": {"every": 4, "patience": 3},
    }
    calm, hunted = small(tmp_path / "calm", **changes), small(tmp_path / "hunted", **changes)
    assert finish(start(calm, processes)) == [0] * processes
    for step in (2, random.Random(processes).randrange(7, 20)):
        kill_when(start(hunted, processes, slow=True), reached(hunted.out, step))
    assert finish(start(hunted, processes)) == [0] * processes
    assert records_of(hunted.out) == records_of(calm.out)
    assert len(curve(calm.out)) >= 16
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm.out))
    a, b = (load_file(settings.out / "model" / "model.safetensors") for settings in (calm, hunted))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_the_model_of_one(tmp_path: Path, parallel: str) -> None:
    """Samples have different numbers of events, and each process its own: only the sum over both is divided."""
    plain = {"model": {"dropout": 0.0}, "batch": {"micro": 3}}
    one, two = small(tmp_path / "one", **plain), small(tmp_path / "two", parallel=parallel, **plain)
    assert finish([*start(one), *start(two, 2)]) == [0, 0, 0]
    got, wanted = records_of(two.out), records_of(one.out)
    assert [record["step"] for record in got] == [record["step"] for record in wanted]
    for a, b in zip(got, wanted, strict=True):
        if "loss" in b:
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        else:
            assert a["validation_NDCG@10"] == pytest.approx(b["validation_NDCG@10"], abs=0.02)
    a, b = (load_file(settings.out / "model" / "model.safetensors") for settings in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-3, rtol=1e-3)


def test_the_best_step_survives_and_is_the_model(tmp_path: Path) -> None:
    """A learning rate that ruins the model: validation gets worse, the run stops, and the best is what is exported."""
    ruin = {"optimizer": {"lr": 0.5, "clip": None}, "schedule": {"name": "constant", "warmup": 20}}
    settings = small(
        tmp_path,
        steps=200,
        **ruin,
        validation={"every": 2, "patience": 4},
        checkpoint={"every": 1, "keep": 1},
    )
    outcome = train_rec(settings)
    scores = {r["step"]: r["validation_NDCG@10"] for r in records_of(outcome.run) if "validation_NDCG@10" in r}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert outcome.best_step == best < outcome.step < 200
    assert outcome.step == best + 4 * 2, "the fourth validation without a better one"
    assert outcome.score["NDCG@10"] == scores[best]
    assert checkpoint_names(outcome.run / "checkpoints") == [f"step-{best:08d}", f"step-{outcome.step:08d}"]
    assert json.loads((outcome.model / "training.json").read_text())["step"] == best
    kept = load_file(outcome.model / "model.safetensors")["model.embed_tokens.weight"]
    (shard,) = (outcome.run / "checkpoints" / f"step-{best:08d}" / "tensors").glob("*.safetensors")
    assert torch.equal(kept, load_file(shard)["model.recommender.model.embed_tokens.weight"])

    again = train_rec(settings)
    assert (again.step, again.best_step) == (outcome.step, best), "it is over: nothing is trained again"
    more = train_rec(replace(settings, steps=outcome.step + 4, validation=replace(settings.validation, patience=50)))
    assert more.step == outcome.step + 4, "with more patience it continues"


def test_epochs_are_as_many_steps_as_they_take(tmp_path: Path) -> None:
    task = RecTask(small(tmp_path, steps=0, epochs=2.5, validation={"every": 0, "epochs": 0.5}), _dataset(tmp_path))
    an_epoch = len(task.table) / 8
    assert task.settings.steps == round(2.5 * an_epoch) and task.settings.validation.every == round(0.5 * an_epoch)
    never = small(tmp_path, validation={"every": 0, "epochs": 0.0})
    assert never.for_samples(100).validation.every == 0


def test_a_log_in_memory_and_items_with_features(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path)
    assert dataset.catalogue.features, "the synthetic events give the cluster of an item"
    settings = small(tmp_path, steps=3)
    first = train_rec(settings, dataset)
    other = Dataset(dataset.histories, Catalogue(dataset.catalogue.items), dataset.users)
    with pytest.raises(ValueError, match=r"was started with different events"):
        train_rec(settings, other)
    second = train_rec(replace(settings, out=tmp_path / "plain"), other)
    a, b = (load_file(outcome.model / "model.safetensors") for outcome in (first, second))
    assert {name for name in a if "feature_embeddings" in name} and not [n for n in b if "feature_embeddings" in n]


def test_samples_are_the_same_however_they_are_kept() -> None:
    lengths = np.array([2, 9, 1, 30, 5])
    items = np.arange(1, lengths.sum() + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    samples = Samples(Histories(offsets, items, items * 10.0), 4)
    for gaps in (False, True):
        held, made = SampleTable(samples, 3, gaps), SampleTable(samples, 3, gaps, limit=0)
        assert held.fits and not made.fits
        for numbers in (np.arange(5), np.arange(5, 40), np.arange(7, 9)):
            one, other = (table.batch(numbers, torch.device("cpu")).tensors() for table in (held, made))
            assert one.keys() == other.keys() and ("gaps" in one) == gaps
            assert all(torch.equal(one[name], other[name]) for name in one)
            assert held.targets(numbers) == int((one["targets"] > 0).sum())


def test_an_order_asked_for_in_stretches_is_the_same_order() -> None:
    order = Order(13, seed=5, at_once=10)
    for first, count in ((0, 4), (4, 4), (6, 30), (36, 1), (2, 3)):
        numbers = np.arange(first, first + count)
        assert np.array_equal(order(numbers), sequence_of(numbers, 13, 5))


def test_bad_settings_are_refused_in_one_sentence_before_anything_is_written(tmp_path: Path) -> None:
    dataset = Dataset(
        Histories(np.array([0, 4, 8]), np.array([1, 2, 3, 4, 4, 3, 2, 1])), Catalogue([*"abcd"]), Users([*"uv"])
    )
    cases: dict[str, dict[str, Any]] = {
        "model.time_gaps needs events with times": {"model": {"time_gaps": True}},
        "a global-time split needs times": {"data": {"split": "global_time"}},
        "validation.metric must be one of HR@1": {"validation": {"metric": "hits"}},
        "steps and epochs are both 0": {"steps": 0, "epochs": 0},
        "loss.count must be at least 1, got 0": {"loss": {"name": "bce", "count": 0}},
        "loss.t must be between 0 and 1": {"loss": {"t": 2.0}},
        "unknown rule 'prsm'": {"model": {"layers": "prsm"}},
        "must be at least 0 and less than 1": {"model": {"dropout": 1.5}},
        "data.length must be at least 1": {"data": {"length": 0}},
    }
    for sentence, change in cases.items():
        with pytest.raises(ValueError, match=sentence) as caught:
            train_rec(small(tmp_path, **change), dataset)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert train_rec(small(tmp_path, steps=2), dataset).step == 2
