"""Training on synthetic tasks: every kind of input, the same data for every rule, and scores that mean what they say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from prism.lab.model import ModelSettings, ProbeModel
from prism.lab.probe import ProbeRun, Trainer, evaluate, loss_of, probe_job, schedule, train_probe
from prism.lab.tasks import batches, catalogue
from prism.lab.tasks.batches import Curriculum, ahead, held_out, is_asked, questions, training_batches
from prism.lab.tasks.catalogue import TASKS, build_task, task_class
from prism.lab.tasks.task import IGNORE, SHARES, Task, draw, hash_rows, stream
from prism.train import loop
from tests.lab.tasks.toys import Copy, Negate, Places

CPU = torch.device("cpu")
SMALL = ModelSettings("gated_delta", width=16, key_dim=4)
RUN = ProbeRun("copy", model=SMALL, steps=60, batch=16, validation_sequences=32, test_sequences=32, evaluations=3)


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    toys: dict[str, type[Task]] = {"copy": Copy, "places": Places, "negate": Negate}
    real = catalogue.task_class
    monkeypatch.setattr(catalogue, "task_class", lambda name: toys.get(name) or real(name))


@pytest.mark.parametrize(
    ("name", "least"), [("copy", 0.9), ("places", 0.9), ("negate", -0.5)]
)  # chance: 1/6, 1/9; answering 0: -1
def test_tokens_several_tokens_and_numbers_are_learned(name: str, least: float) -> None:
    result = train_probe(replace(RUN, task=name))
    label = next(iter(result["scores"]))
    assert result["scores"][label] > least and result["validation"] > least
    assert result["state_size"] == 4 * 16 and result["steps"] == 60
    assert [point["step"] for point in result["curve"] if "score" in point] == [20, 40, 60]
    assert result["curve"][-1]["tokens"] == result["tokens"] == 60 * 16 * {"copy": 8, "places": 4, "negate": 3}[name]
    assert result["ceiling"][label] == (0.0 if name == "negate" else 1.0)
    assert json.loads(json.dumps(result)) == result


def test_a_run_survives_json_and_a_test_may_have_other_options() -> None:
    run = replace(RUN, tests={"short": {"length": 4}, "long": {"length": 16}}, curriculum=Curriculum("length", 2))
    plain = json.loads(json.dumps(asdict(run)))
    assert ProbeRun.from_plain(plain) == run
    assert {name: task.length for name, task in run.build_tests().items()} == {"short": 4, "long": 16}  # type: ignore[attr-defined]
    assert list(probe_job({**plain, "steps": 6}, lambda step, loss: None)["scores"]) == ["short", "long"]


def test_every_rule_sees_the_same_data_at_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[str, int], list[torch.Tensor]] = {}

    def watch(self: Trainer, batch: Any) -> torch.Tensor:
        seen.setdefault((self.model.mixers[0].rule.name, rate_of[0]), []).append(batch.inputs)  # type: ignore[union-attr,index]
        return torch.zeros(4)

    monkeypatch.setattr(Trainer, "differentiate", watch)
    rate_of = [0]
    for rule in ("gated_delta", "linear", "softmax"):
        for seed in (0, 1):
            rate_of[0] = seed
            train_probe(replace(RUN, model=replace(SMALL, rule=rule), seed=seed, steps=5, test=False))
    for seed in (0, 1):
        first, *others = (torch.stack(seen[rule, seed]) for rule in ("gated_delta", "linear", "softmax"))
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(torch.stack(seen["linear", 0]), torch.stack(seen["linear", 1]))


def test_training_validation_and_test_share_no_sequence() -> None:
    trained = torch.cat([batch.inputs for batch in training_batches([(20, Copy())], 16, 0, CPU)])
    kept = {
        split: torch.cat([batch.inputs for batch in held_out(Copy(), 50, split, 0)]) for split in ("validation", "test")
    }
    for split, rows in {"train": trained, **kept}.items():
        low, high = SHARES[split]
        assert ((hash_rows(rows) % 4 >= low) & (hash_rows(rows) % 4 < high)).all()


def test_places_are_those_that_are_asked() -> None:
    batch = draw(Copy(), 12, "train", stream("train", 3))
    inputs, places, targets = questions(batch, 3)
    assert inputs.shape == (3, 4, 8) and torch.equal(inputs.flatten(0, 1), batch.inputs)
    for asked, found, wanted in zip(places, targets, batch.targets.split(4), strict=True):
        real = is_asked(found)
        assert torch.equal(wanted.flatten()[asked], found)
        assert real.sum() == (wanted != IGNORE).sum() and len(set(asked[real].tolist())) == real.sum()
    numbers = questions(draw(Negate(), 5, "train", stream("train", 3)))
    assert numbers.targets.shape == (1, 5, 2) and numbers.asked.tolist() == [[2, 5, 8, 11, 14]]


def test_losses_ignore_what_is_not_asked() -> None:
    logits, targets = torch.randn(5, 4), torch.tensor([1, IGNORE, 3, 0, IGNORE])
    asked = targets != IGNORE
    assert torch.isclose(loss_of(logits, targets), F.cross_entropy(logits[asked], targets[asked]))
    numbers = torch.randn(5, 2, requires_grad=True)
    wanted = torch.randn(5, 2)
    wanted[2] = torch.nan
    loss = loss_of(numbers, wanted)
    keep = [0, 1, 3, 4]
    assert torch.isclose(loss, F.mse_loss(numbers[keep], wanted[keep]))
    loss.backward()
    assert numbers.grad is not None and numbers.grad.isfinite().all() and not numbers.grad[2].any()


def test_scores_are_those_of_the_task() -> None:
    """A model that always answers 0 is right as often as 0 was asked for."""

    class Zero(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, inputs: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
            return F.one_hot(torch.zeros(len(asked), dtype=torch.long), 6).float()

    data = held_out(Copy(), 40, "test", 0)
    rows = torch.cat([batch.targets for batch in data])
    expected = ((rows == 0).sum(1) / (rows != IGNORE).sum(1)).double().mean()
    assert evaluate(Zero(), Copy(), data) == pytest.approx(expected.item())


def test_a_curriculum_doubles_an_option() -> None:
    stages = Curriculum("length", 3, 0.5).stages(Copy(20), 100)
    assert [(steps, task.length) for steps, task in stages] == [(16, 3), (16, 6), (16, 12), (52, 20)]  # type: ignore[attr-defined]
    lengths = [batch.inputs.shape[1] for batch in training_batches(stages, 2, 0, CPU)]
    assert lengths == [3] * 16 + [6] * 16 + [12] * 16 + [20] * 52
    assert [steps for steps, _ in Curriculum("length", 3).stages(Copy(20), 4)] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="has 4 stages, but training has 3 steps"):  # never more steps than the budget
        Curriculum("length", 3).stages(Copy(20), 3)


def test_a_run_stops_when_it_is_solved_and_fails_when_it_diverges() -> None:
    stopped = train_probe(replace(RUN, stop_at=-1.0))
    assert stopped["steps"] == 20 and stopped["tokens"] == 20 * 16 * 8
    with pytest.raises(FloatingPointError, match="the loss is not finite"):
        train_probe(replace(RUN, learning_rate=1e30, clip=1e30, model=replace(SMALL, rule="linear", hidden=8)))


def test_a_value_that_the_engine_refuses_is_a_training_that_diverged() -> None:
    wild = replace(RUN, learning_rate=1e30, clip=1e30, model=replace(SMALL, rule="gated_delta", hidden=0))
    with pytest.raises(FloatingPointError, match=r"the training diverged at step \d+ of 60: log_decay holds"):
        train_probe(wild)


def test_without_the_test_split_nothing_is_tested() -> None:
    assert train_probe(replace(RUN, steps=3, test=False))["scores"] == {}


def test_options_of_the_model() -> None:
    def count(**changes: Any) -> int:
        return ProbeModel(Copy(), replace(SMALL, **changes)).parameter_count

    base = count()
    assert count(conv_size=1) == base - 4 * 16
    assert count(hidden=8) == base + 3 * 16 * 8 + 16
    assert count(positions=12) == base + 12 * 16
    with pytest.raises(ValueError, match="12 tokens, but there are 8 learned positions"):
        train_probe(replace(RUN, steps=1, model=replace(SMALL, positions=8)))
    with pytest.raises(ValueError, match="has no option 'width'"):
        replace(SMALL, options={"width": 3})


def test_the_embedding_and_head_are_equal_for_every_rule() -> None:
    weights = []
    for rule in ("gated_delta", "softmax"):
        torch.manual_seed(3)
        model = ProbeModel(Copy(), replace(SMALL, rule=rule))
        weights.append((model.inputs.tokens.weight, model.head.weight))  # type: ignore[union-attr]
    for first, second in zip(*weights, strict=True):
        assert torch.equal(first, second)


def test_a_mixture_of_memories_is_balanced() -> None:
    """Its balance loss is part of the loss: without other gradients its router would not move."""
    run = replace(RUN, model=ModelSettings("mom", {"top_k": 1, "memories": 2}, width=16), steps=1)
    model = ProbeModel(Copy(), run.model)
    shared: dict[str, torch.Tensor] = {}
    batch = next(training_batches([(1, Copy())], 4, 0, CPU))
    model(batch.inputs, batch.asked, shared)
    assert "balance_loss" in shared
    trainer = Trainer(model, run, CPU, iter(()))
    plain = loss_of(model(batch.inputs, batch.asked), batch.targets)
    assert trainer.differentiate(batch)[0].item() == pytest.approx(
        plain.item() + shared["balance_loss"].item(), rel=1e-5
    )


def test_a_thread_draws_the_same_batches_and_passes_its_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    direct = list(training_batches([(200, Copy())], 2, 0, CPU))
    monkeypatch.setattr(batches, "draws_on", lambda task, device: False)
    threaded = list(training_batches([(200, Copy())], 2, 0, CPU))
    assert len(direct) == len(threaded) == 200
    for a, b in zip(direct, threaded, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    def broken() -> Any:
        yield from training_batches([(1, Copy())], 2, 0, CPU)
        raise ValueError("no more")

    found = ahead(broken(), CPU)
    next(found)
    with pytest.raises(ValueError, match="no more"):
        next(found)
    early = ahead(training_batches([(10_000, Copy())], 2, 0, CPU), CPU)
    next(early)
    early.close()  # the thread ends, although the queue is full


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [schedule(step, 100, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) == max(rates)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"warmup": 1.0}, "warmup"),
        ({"precision": "half"}, "precision"),
    ],
)
def test_runs_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(RUN, **changes)


def test_unknown_tasks_and_options_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'mqra' .did you mean 'mqar'.*choose from mqar, "):
        task_class("mqra")
    with pytest.raises(ValueError, match=r"has a setting pair that does not exist .did you mean pairs"):
        build_task("mqar", {"pair": 2})
    assert task_class("mqar").name == "mqar" and "mqar" in TASKS


def test_reading_a_step_late_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the loss of a step is read when the next one is queued."""
    results = []
    for late in (False, True):
        monkeypatch.setattr(loop, "decides_on_device", lambda _, late=late: late)
        result = train_probe(replace(RUN, steps=50, stop_at=0.5))
        for point in (result, *result["curve"]):
            for name in [name for name in point if name.startswith("seconds")]:
                del point[name]
        results.append(result)
    assert results[0] == results[1]


def test_low_precision_products_train_too() -> None:
    result = train_probe(replace(RUN, precision="bfloat16", steps=20, test=False))
    assert math.isfinite(result["loss"])


@pytest.mark.gpu
def test_a_captured_step_computes_what_an_ordinary_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(RUN, device="cuda", steps=12, test=False)
    captured = train_probe(run)
    assert captured["graph"]
    ordinary = Trainer.__init__

    def without(self: Trainer, *arguments: Any) -> None:
        ordinary(self, *arguments)
        self.captures = False

    monkeypatch.setattr(Trainer, "__init__", without)
    assert train_probe(run)["loss"] == pytest.approx(captured["loss"], rel=1e-4)
