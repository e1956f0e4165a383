"""`prism train dpo`: the loss against its definition, where it starts, what is learned, saved and resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prism.cli import main
from prism.language.dpo import DpoTask, reference_of, train_dpo
from prism.language.tune import opened, prepared
from prism.models import PrismForCausalLM
from prism.train.run import read_log
from tests.children import final_tensors, same_tensors
from tests.language.tuning import Killed, at, quiet, small_dpo
from tests.tiny_lm import save_lm

Captured = pytest.CaptureFixture[str]
CHANGES: dict[str, dict[str, Any]] = {"whole": {}, "lora": {"lora": {"rank": 2, "dropout": 0.1}}}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind, changes in CHANGES.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        train_dpo(small_dpo(found[kind], **changes), quiet)
    return found


def task_of(root: Path, **changes: Any) -> DpoTask:
    with opened(small_dpo(root, **changes)) as (settings, base, chat):
        corpus = prepared(settings, chat, packing=False, pairs=True)
        return DpoTask(settings, base, chat, corpus, reference_of(settings, base, corpus))


def log_probability(model: PrismForCausalLM, prompt: str, answer: str) -> float:
    """Of an answer and its end, given the prompt, token by token of the text that the default template writes."""
    text = [256, *f"user\n{prompt}".encode(), 256, *b"assistant\n", *answer.encode(), 256]
    first = len(text) - len(answer.encode()) - 1
    chances = model(torch.tensor([text])).logits[0].log_softmax(-1)
    return sum(float(chances[t - 1, text[t]]) for t in range(first, len(text)))


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_loss_is_its_definition(roots: dict[str, Path], beta: float) -> None:
    task = task_of(roots["whole"], beta=beta)
    policy = PrismForCausalLM.from_pretrained(roots["whole"] / "run" / "model").eval()
    reference = PrismForCausalLM.from_pretrained(roots["whole"] / "base").eval()
    lines = [json.loads(line) for line in (roots["whole"] / "pairs.jsonl").read_text().splitlines()]
    expected = []
    with torch.no_grad():
        for number, pair in enumerate(lines, 1):
            if number % 10:  # the others are held out
                margin = 0.0
                for sign, answer in ((1, pair["chosen"]), (-1, pair["rejected"])):
                    for model, part in ((policy, 1), (reference, -1)):
                        margin += sign * part * log_probability(model, pair["prompt"], answer)
                expected.append(math.log1p(math.exp(-beta * margin)))
        epoch = np.arange(task.count)
        total = task.loss(policy, task.samples(epoch, torch.device("cpu")))
    assert task.weight(epoch) == len(expected) == 36
    assert float(total) == pytest.approx(sum(expected), rel=1e-4)


@pytest.mark.parametrize("kind", CHANGES)
def test_the_loss_starts_at_log_2_and_falls(roots: dict[str, Path], kind: str) -> None:
    """Before the first step the model is the reference: an adapter starts as a map to 0."""
    records = read_log(roots[kind] / "run" / "log.jsonl")
    steps = [record["loss"] for record in records if "loss" in record]
    held = [record for record in records if "validation_loss" in record]
    assert steps[0] == pytest.approx(math.log(2), abs=1e-4) and steps[-1] < 0.6
    assert held[-1]["validation_accuracy"] == 1 and held[-1]["validation_margin"] > held[0]["validation_margin"] > 0


def test_the_reference_does_not_depend_on_the_adapter(roots: dict[str, Path]) -> None:
    tasks = [task_of(roots["whole"]), task_of(roots["whole"], lora={"rank": 2}, out=str(roots["whole"] / "other"))]
    for split in ("train", "validation"):
        assert torch.equal(*(task.reference[split] for task in tasks))
    assert len(list((roots["whole"] / "cache" / "references").glob("*.safetensors"))) == 1


@pytest.mark.parametrize("kind", CHANGES)
def test_killed_and_resumed_is_bit_identical(roots: dict[str, Path], kind: str, tmp_path: Path) -> None:
    hunted, calm = replace(small_dpo(roots[kind], **CHANGES[kind]), out=tmp_path / "run"), roots[kind] / "run"
    with pytest.raises(Killed):
        train_dpo(hunted, at(8))
    torch.manual_seed(123)
    train_dpo(hunted, quiet)
    stable = [
        [{k: v for k, v in r.items() if "second" not in k} for r in read_log(run / "log.jsonl")]
        for run in (hunted.out, calm)
    ]
    assert stable[0] == stable[1]
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm))


def test_micro_batches_and_cut_rows_are_the_same_pairs(roots: dict[str, Path]) -> None:
    task = task_of(roots["whole"])
    whole = task.samples(np.arange(6), torch.device("cpu"))
    model = PrismForCausalLM.from_pretrained(roots["whole"] / "base").eval()
    with torch.no_grad():
        parts = sum(float(task.loss(model, whole[i : i + 2])) for i in range(0, 6, 2))
        assert parts == pytest.approx(float(task.loss(model, whole)), rel=1e-5)
    assert whole.tensors().keys() == {"inputs", "targets", "reference"}


def test_what_is_exported(roots: dict[str, Path]) -> None:
    whole, lora = (roots[kind] / "run" / "model" for kind in CHANGES)
    assert "prefer the better of two answers" in (whole / "README.md").read_text()
    assert "100.0 % of them" in (whole / "README.md").read_text() and (whole / "chat_template.jinja").is_file()
    assert all(".lora_" in name for name in load_file(lora / "adapter_model.safetensors"))


def test_a_run_is_resumed_by_its_folder_and_bad_input_is_one_sentence(tmp_path: Path, capsys: Captured) -> None:
    settings = small_dpo(tmp_path)
    base, data = str(save_lm(tmp_path / "other", "gated_delta*1")), ["--data", settings.data.sources[0]]
    options = ["--data.cache", str(tmp_path / "c"), "--out", str(tmp_path / "dpo"), "--device", "cpu"]
    options += ["--data.context", "48"]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x", "chosen": "y"}')
    cases = {
        "as in `prism train dpo MODEL": data,
        "bad.jsonl, line 1: expected prompt, chosen and rejected": [base, "--data", str(tmp_path / "bad.jsonl")],
        "beta must be above 0, got 0.0": [base, *data, "--beta", "0"],
        "pairs of answers have none: omit --graph": [base, *data, "--graph"],
    }
    capsys.readouterr()
    for sentence, arguments in cases.items():
        assert main(["train", "dpo", *arguments, *options]) == 2, sentence
        lines = capsys.readouterr().err.splitlines()
        said = "\n".join(line for line in lines if not line.startswith("encoding "))
        assert sentence in said and "\n" not in said, f"expected {sentence!r}, got: {said}"
    assert not (tmp_path / "dpo").exists()
    assert main(["train", "dpo", base, *data, *options, "--steps", "1"]) == 0
    assert "38 pairs to train on and 2 to validate" in capsys.readouterr().err
    assert main(["train", "dpo", "--out", str(tmp_path / "dpo"), "--steps", "2"]) == 0
    assert "trained 2 steps; the better answer is preferred in" in capsys.readouterr().out
    assert main(["train", "sft", "--out", str(tmp_path / "dpo")]) == 2
    assert "holds a run of `prism train dpo`, not of `prism train sft`" in capsys.readouterr().err
