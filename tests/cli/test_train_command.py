"""`prism train lm` from the command line: a model at the end, and one sentence for every kind of bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prism.cli import main
from tests.train.runs import write_corpus

TINY = [
    "--steps",
    "4",
    "--model.hidden-size",
    "32",
    "--model.num-heads",
    "2",
    "--model.head-dim",
    "16",
    "--model.num-hidden-layers",
    "2",
]
TINY += ["--data.context", "16", "--batch.sequences", "2", "--validation.sequences", "4", "--device", "cpu"]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    source = write_corpus(tmp_path / "corpus")
    places = ["--data.sources", str(source), "--data.cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    return ["train", "lm", *TINY, *places]


@pytest.mark.parametrize("layers", ["prism", "gated_delta+softmax"])
def test_the_result_is_a_model_for_transformers(tmp_path: Path, command: list[str], layers: str) -> None:
    bpe = ["--data.tokenizer", "bpe", "--data.bpe-size", "300", "--model.options"]
    options = ["prism.steps=3"] if layers == "prism" else ["softmax.kv_heads=1"]
    assert main([*command, "--model.layers", layers, *bpe, *options]) == 0
    folder = tmp_path / "run" / "model"
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "manifest.json",
        "modeling_prism.py",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert {path.name for path in folder.iterdir()} == names

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == 320 and model.config.eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer(["12 bottles", "7"], return_tensors="pt", padding=True)
    assert tokenizer.decode(inputs.input_ids[0]) == "12 bottles"
    written = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert written.shape[1] <= inputs.input_ids.shape[1] + 5
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("exported", [True, False])
def test_a_run_folder_is_continued_from(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str], exported: bool
) -> None:
    """With its exported model, or with its newest checkpoint."""
    base, more = tmp_path / "run", tmp_path / "more"
    assert main([*command, "--model.layers", "gated_delta", "--data.tokenizer", "bpe", "--data.bpe-size", "300"]) == 0
    old = load_file(base / "model" / "model.safetensors")
    if not exported:
        shutil.rmtree(base / "model")
    data = ["--data.sources", str(tmp_path / "corpus"), "--data.cache", str(tmp_path / "cache"), "--device", "cpu"]
    words = [
        "train",
        "lm",
        "--init",
        str(base),
        *data,
        "--data.context",
        "16",
        "--batch.sequences",
        "2",
        "--out",
        str(more),
    ]
    words += ["--validation.sequences", "4", "--optimizer.lr", "1e-4", "--schedule.warmup", "0"]
    capsys.readouterr()
    assert main([*words, "--steps", "1"]) == 0
    assert (f"of {base}" in capsys.readouterr().err) is not exported
    new = load_file(more / "model" / "model.safetensors")
    assert new.keys() == old.keys() and all((new[name] - old[name]).abs().max() < 0.005 for name in new)
    stored = json.loads((more / "config.json").read_text())["settings"]
    assert stored["model"]["weights"] == str(base) and stored["data"]["tokenizer"] == str(base / "tokenizer.json")
    assert main([*words, "--steps", "2"]) == 0, "it is resumed"


def test_samples_are_shown_and_change_nothing(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights, to the bit, and the same losses; the samples follow the model."""
    weights, logs = [], []
    for name, more in {"plain": [], "shown": ["--sample.every", "2", "--sample.prompt", "12 b"]}.items():
        assert main([*command, "--out", str(tmp_path / name), *more, "--optimizer.lr", "0.1"]) == 0
        weights.append(load_file(tmp_path / name / "model" / "model.safetensors"))
        logs.append([json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()])
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    samples = {record["step"]: record.pop("sample") for record in logs[1] if "sample" in record}
    assert list(samples) == [2, 4] and all(text.startswith("12 b") for text in samples.values())
    assert samples[2] != samples[4]
    losses = [[record["loss"] for record in log if "loss" in record] for log in logs]
    assert losses[0] == losses[1]
    printed = capsys.readouterr().err
    assert "step 2: sample" in printed and "  12 b" in printed


def test_bad_input_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    torch.save({"w": torch.ones(1)}, tmp_path / "weights.pt")
    (tmp_path / "pickled").mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "wrong.toml").write_text("[model]\nwidth = 3\n")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    cases = {
        "the corpus is empty": ["--data.sources", str(tmp_path / "empty")],
        "there is no file or folder": ["--data.sources", str(tmp_path / "nowhere")],
        "is not UTF-8 text": ["--data.sources", str(tmp_path / "latin.txt")],
        "model.vocab_size is 100, but the tokenizer has 257 tokens": ["--model.vocab-size", "100"],
        "too few for a context of 1000000": ["--data.context", "1000000"],
        "unknown preset '7b'": ["--preset", "7b"],
        "unknown setting --model.width": ["--model.width", "3"],
        "has a setting model.width that does not exist": ["--config", str(tmp_path / "wrong.toml")],
        "weights.pt has no safetensors file: pickled weights": ["--model.weights", str(tmp_path / "weights.pt")],
        "pickled has no safetensors file: pickled weights": ["--model.weights", str(tmp_path / "pickled")],
        "there are no weights at": ["--model.weights", str(tmp_path / "nowhere")],
        "unknown rule 'prsm' (did you mean 'prism'?)": ["--model.layers", "prsm"],
        "model.options has 'steps=3'": ["--model.options", "steps=3"],
        "has no option 'wings'": ["--model.options", "prism.wings=3"],
        "parallel is fsdp: start the run with torchrun": ["--parallel", "fsdp"],
        "parallel.context is 4: start the run with torchrun": ["--parallel.context", "4"],
        "device 'abacus' cannot be used here": ["--device", "abacus"],
        "device 'cuda' cannot be used here": ["--device", "cuda"],
        "is not empty and holds no run": ["--out", str(tmp_path / "used")],
        "there is no tokenizer file": ["--data.tokenizer", "words.json"],
    }
    for sentence, arguments in cases.items():
        assert main([*command, *arguments]) == 2, sentence
        said = "\n".join(line for line in capsys.readouterr().err.splitlines() if not line.startswith("tokenizing "))
        assert sentence in said and "\n" not in said, f"expected {sentence!r}, got: {said}"
    assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path: Path, command: list[str]) -> None:
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "prism"]
    subprocess.run([*runner, *command], check=True, timeout=300)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["processes"] == 2 and (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_run_resumes_from_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    write_corpus(home / "corpus")
    away.mkdir()
    monkeypatch.chdir(home)
    run = str(home / "run")
    first = ["train", "lm", *TINY, "--data.sources", "corpus", "--data.cache", "cache", "--out", "run"]
    assert main([*first, "--steps", "2"]) == 0
    assert not Path(json.loads((home / "run" / "config.json").read_text())["settings"]["data"]["cache"]).is_absolute()
    for folder, steps in ((away, "3"), (home, "4")):
        monkeypatch.chdir(folder)
        assert main(["train", "lm", "--out", run, "--steps", steps]) == 0, capsys.readouterr().err
        assert f"trained {steps} steps" in capsys.readouterr().out
    assert not (away / "cache").exists(), "the tokens are found again"

    stored = json.loads((home / "run" / "config.json").read_text())
    assert stored["settings"]["data"]["sources"] == ["corpus"], (
        "as it was given, seen from where the run was last started"
    )
    monkeypatch.chdir(home)
    assert main(["train", "lm", "--out", run, "--steps", "5"]) == 0
