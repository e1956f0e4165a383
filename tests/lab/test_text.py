"""A training on text for a comparison: rivals train, results are complete and repeatable, a search reads no test split."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prism.lab.grid import Records
from prism.lab.plan import make_plan
from prism.lab.text import TextRun, build, count_parameters, prepare, score_split, sizes, train_text
from prism.language.corpus import Corpus, open_corpus
from prism.language.task import Validation
from prism.train.checkpoint import NotFiniteError
from prism.train.distributed import World

HEAD = {"key_dim": 8, "value_dim": 16}
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("softmax", {"key_dim": 16, "conv_size": 4}),
    "mamba2": ("mamba2", HEAD),
    "gated_delta": ("gated_delta", HEAD),
    "delta_product": ("delta_product", {**HEAD, "forget_gate": True, "gate": True, "negative_eigenvalues": False}),
    "prism-3": ("prism", {**HEAD, "steps": 3}),
}


def settings(data: Path, rule: str = "gated_delta", options: Any = HEAD, **changes: Any) -> dict[str, Any]:
    model = {
        "layers": rule,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_heads": 1,
        "rule_options": {rule: options},
        "intermediate_size": 16,
    }
    found = {"data": str(data), "model": model, "steps": 3, "learning_rate": 1e-2, "context": 16, "batch": 2}
    return {**found, "evaluations": 2, "device": "cpu", **changes}


def nothing(step: int, loss: float) -> None: ...


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_trains_and_its_results_are_plain(data: Path, name: str) -> None:
    steps: list[int] = []
    result = train_text(settings(data, *RIVALS[name], contexts=[64]), lambda step, loss: steps.append(step))
    assert json.loads(json.dumps(result)) == result
    assert steps == [1, 2, 3]
    assert [point["step"] for point in result["curve"]] == [2, 3]
    assert result["tokens"] == result["curve"][-1]["tokens"] == 3 * 2 * 16
    assert set(result["text"]["test"]) == {"16", "64"}
    test = result["text"]["test"]["16"]
    assert result["scores"]["nats"] == test["nats_per_token"] < math.log(400)
    assert list(result["scores"]) == ["nats", "bits per byte", "repeated rare bigrams", "nats at 64"]
    assert result["better"] == "lower"
    manifest = open_corpus(data).manifest
    assert result["corpus"]["digest"] == manifest.digest
    assert result["corpus"]["test"] == {"tokens": manifest.splits["test"].tokens, "documents": 2}


def test_results_on_other_tokens_are_not_taken_for_finished(data: Path, tmp_path: Path) -> None:
    options = {"data": str(data), "context": 16}
    values = {
        "rules": ["gated_delta", "linear"],
        "budget": {"steps": 2, "batch": 2, "width": 16, "heads": 1, "key_dim": 8, "conv": 1, "hidden": 16},
        "learning_rate": {"values": [1e-2, 2e-2]},
        "tasks": [{"task": "text", "options": options}],
    }
    plan = make_plan(values, "file")
    records = Records(tmp_path / "results.jsonl")
    digest = open_corpus(data).manifest.digest
    assert plan.entries[0].data == digest
    for training in (plan.entries[1].search()[1], plan.entries[0].final(2e-2)[0]):
        with records.writing():
            records.add(training, "done", result={"corpus": {"digest": digest}})
        plan.check_results(records)
        with records.writing():
            records.add(training, "done", result={"corpus": {"digest": "0123"}})
        with pytest.raises(ValueError, match=f"has runs on other tokens than {data} has now .*: choose another folder"):
            plan.check_results(records)
        with records.writing():
            records.add(training, "done", result={})  # older results do not say it
    plan.check_results(records)


def test_training_lowers_the_loss_and_a_seed_repeats_it(data: Path) -> None:
    given = settings(data, steps=20, batch=4)
    first, second = train_text(given, nothing), train_text(given, nothing)
    assert first["validation"] == second["validation"] < first["curve"][0]["loss"]
    assert train_text({**given, "seed": 1}, nothing)["validation"] != first["validation"]


def test_a_search_does_not_read_the_test_split(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    stream = Corpus.stream
    monkeypatch.setattr(Corpus, "stream", lambda corpus, split: read.append(split) or stream(corpus, split))  # type: ignore[func-returns-value]
    result = train_text(settings(data, test=False), nothing)
    assert result["scores"] == {} and set(result["text"]) == {"validation"}
    assert "test" not in read and "validation" in read


def test_a_split_scores_as_the_training_loop_validates(data: Path) -> None:
    run, corpus = TextRun.of(settings(data)), open_corpus(data)
    _, stepper = prepare(run, corpus)
    model: Any = stepper.model.eval()
    for parameter in model.parameters():  # so large that every token before counts
        torch.nn.init.normal_(parameter, std=0.5)
    ours = score_split(run, corpus, model, "validation", run.context)
    theirs = Validation.of(corpus, run.context, corpus.manifest.end, 0).score(model, World(torch.device("cpu")), 2)
    assert ours["nats_per_token"] == pytest.approx(theirs.nats, rel=1e-5)
    assert ours["bits_per_byte"] == pytest.approx(theirs.bits_per_byte, rel=1e-5)


def test_sizes_need_no_weights(data: Path) -> None:
    model = settings(data)["model"]
    built = build(model, 320, 0)
    assert sizes(model, 320) == (count_parameters(built), 8 * 16)


def test_a_loss_that_is_never_finite_ends_the_run(data: Path) -> None:
    with pytest.raises(NotFiniteError, match="not finite 10 times in a row"):
        train_text(settings(data, steps=30, learning_rate=1e30, clip=None), nothing)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"contxt": 3}, "has no setting 'contxt' (did you mean 'context'?)"),
        ({"context": "x"}, "context must be an integer, got 'x'"),
        ({"model": {"hiden_size": 3}}, "a model has no setting 'model.hiden_size' (did you mean 'hidden_size'?)"),
        ({"model": 3}, "model must be a table, got 3"),
        ({"schedule": "linear"}, "schedule must be one of cosine, wsd, constant, got 'linear'"),
        ({"contexts": [64, 0]}, "contexts must be at least 1, got 0"),
        ({"evaluations": 0}, "evaluations must be at least 1, got 0"),
        ({"rare": -1}, "rare must be at least 0, got -1"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1, got 1"),
        ({"lambada": "none.jsonl"}, "lambada must be a jsonl file, and there is no none.jsonl"),
    ],
)
def test_a_wrong_setting_is_one_sentence(data: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        TextRun.of(settings(data, **changes))


@pytest.mark.parametrize("name", ["steps", "learning_rate"])
def test_what_has_no_default_must_be_given(data: Path, name: str) -> None:
    given = settings(data)
    del given[name]
    with pytest.raises(ValueError, match=f"^{name} must be"):
        TextRun.of(given)


def test_a_context_longer_than_its_split_is_refused_before_training(data: Path) -> None:
    """Also the other way round: one that just fits is measured at its own length."""
    tokens = open_corpus(data).manifest.splits["test"].tokens
    steps: list[int] = []
    for wrong, name in (({"contexts": [tokens]}, "contexts"), ({"context": 10**6}, "context")):
        with pytest.raises(ValueError, match=rf"options\.{name} has .* tokens, but the split '.*' of .* has only"):
            train_text(settings(data, **wrong), lambda step, loss: steps.append(step))
    assert steps == []
    found = train_text(settings(data, steps=1, contexts=[tokens - 1]), nothing)
    assert found["text"]["test"][str(tokens - 1)]["tokens"] == tokens - 1
    train_text(settings(data, steps=1, contexts=[tokens], test=False), nothing)  # it is not measured
