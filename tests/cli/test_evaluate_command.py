"""`prism evaluate lm`: a table, JSON output, one sentence per mistake, and run folders given as models."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from prism.cli import main
from prism.language.corpus import write_splits
from prism.language.settings import Settings
from prism.language.task import train_lm
from prism.language.tokenizer import ByteTokenizer, train_bpe
from prism.overrides import override
from tests.tiny_lm import save_lm

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, with two checkpoints and an exported model."""
    root = tmp_path_factory.mktemp("run")
    (root / "text.txt").write_text("".join(f"{i} bottles, take {i % 7} down\n" for i in range(200)))
    values = {
        "out": str(root / "run"),
        "steps": 4,
        "device": "cpu",
        "model": {"layers": "prism", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "head_dim": None},
        "data": {"sources": [str(root / "text.txt")], "cache": str(root / "cache"), "context": 16},
        "batch": {"sequences": 2},
        "optimizer": {"lr": 0.05},
        "schedule": {"warmup": 0},
        "validation": {"every": 0, "sequences": 2},
        "checkpoint": {"every": 2},
    }
    outcome = train_lm(override(Settings(), values, "test"))
    assert outcome.model is not None
    return root / "run"


def test_results_as_json(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"the text of {name}: é\n")
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--output", str(tmp_path / "out" / "result.json")]
    assert main(["evaluate", "lm", str(folder), *arguments]) == 0
    printed = capsys.readouterr().out
    assert all(column in printed for column in ("Perplexity", "ppl/", "token", "word", "bits/", "byte"))
    table = [line for line in printed.splitlines() if str(tmp_path) not in line]  # a path may be long
    assert max(map(len, table)) <= 80
    results = json.loads((tmp_path / "out" / "result.json").read_text())["results"]["files"]
    a, b, total = results[str(tmp_path / "a.txt")], results[str(tmp_path / "b.txt")], results["total"]
    assert total["tokens"] == a["tokens"] + b["tokens"] == 2 * (len("the text of a.txt: é\n".encode()) + 1)
    nats = sum(r["nats_per_token"] * r["tokens"] for r in (a, b))
    assert total["bits_per_byte"] == pytest.approx(nats / math.log(2) / total["text_bytes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to evaluate: give files, --lambada, or --tasks with --data-dir"),
        (["--lambada", "README.md", "--positions"], "--positions and --train-tokens break down the loss on files"),
        (["README.md", "--train-tokens", "docs"], "docs has no manifest.json: give a folder of prepared tokens"),
        (["nowhere.txt"], "there is no file or folder nowhere.txt"),
        (["--tasks", "piqa"], "--tasks needs --data-dir"),
        (["--tasks", "piqa", "--data-dir", "nowhere"], "there is no data folder nowhere"),
        (["README.md", "--stride", "3"], "stride is 3: it needs a context"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    folder: Path, capsys: Captured, arguments: list[str], message: str
) -> None:
    assert main(["evaluate", "lm", str(folder), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_file_names_are_whole_in_a_narrow_terminal(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["held-out-articles.txt", "books/chapter-012.txt"]
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text("some text " * 30)
    assert main(["evaluate", "lm", str(folder), str(tmp_path / "texts")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.strip().startswith(name) for line in lines) for name in [*names, "total"])
    assert max(map(len, lines)) <= 80


def test_square_brackets_of_file_names_are_shown(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    for name in ("he[ld].txt", "end[bold].txt"):
        (tmp_path / name).write_text("some text")
    assert main(["evaluate", "lm", str(folder), str(tmp_path / "he[ld].txt"), str(tmp_path / "end[bold].txt")]) == 0
    captured = capsys.readouterr()
    assert all(name in captured.out and name in captured.err for name in ("he[ld].txt", "end[bold].txt"))


def test_layers_that_keep_every_token_say_so(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.txt").write_text("some text")
    assert main(["evaluate", "lm", str(save_lm(tmp_path / "lm", "prism+softmax")), str(tmp_path / "a.txt")]) == 0
    assert "memory grows" in capsys.readouterr().err


class TestRuns:
    """A run folder stands for its newest model."""

    def text(self, run: Path, capsys: Captured) -> tuple[str, str]:
        assert main(["generate", str(run), "--prompt", "9 bottles", "--max-new-tokens", "60"]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    def test_its_exported_model(self, run: Path, capsys: Captured) -> None:
        text, message = self.text(run, capsys)
        assert text == self.text(run / "model", capsys)[0]
        assert "using checkpoint" not in message

    def test_a_newer_checkpoint(self, run: Path, tmp_path: Path, capsys: Captured) -> None:
        run = shutil.copytree(run, tmp_path / "run")
        expected = self.text(run, capsys)[0]
        newest = run / "checkpoints" / "step-00000004"
        later = (run / "model").stat().st_mtime + 10
        os.utime(newest, (later, later))
        text, message = self.text(run, capsys)
        assert text == expected
        assert f"using checkpoint step-00000004 of {run}" in message

        (newest / "state.json").write_text("{}")  # damaged: the one before it is used, and nothing is moved
        os.utime(run / "checkpoints" / "step-00000002", (later, later))
        text, message = self.text(run, capsys)
        assert text != expected
        assert "step-00000004 is damaged: state.json" in message
        assert "using checkpoint step-00000002" in message
        assert newest.is_dir()

    def test_no_checkpoint_yet(self, run: Path, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
        assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
        assert "is a run without a checkpoint" in capsys.readouterr().err


def test_the_loss_is_broken_down_and_last_words_are_counted(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.txt").write_text("xy zq xy zq and xy zq")
    (tmp_path / "passages.jsonl").write_text('{"text": "say it"}\n{"text": "say it again"}\n')
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_splits(tokens, {"train": ["xy xy xy xy"]}, ByteTokenizer())
    flags = ["--positions", "--train-tokens", str(tokens), "--rare", "2", "--output", str(tmp_path / "found.json")]
    arguments = [str(tmp_path / "a.txt"), *flags, "--lambada", str(tmp_path / "passages.jsonl")]
    assert main(["evaluate", "lm", str(folder), *arguments]) == 0
    printed = capsys.readouterr().out
    assert all(
        part in printed for part in ("17-32", "repeated rare bigrams", "the rest", "accuracy", "word_perplexity")
    )
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert sum(part["tokens"] for part in found["positions"]) == 22
    # " z" and "zq" twice, "q " once; training had "xy", "y " and " x" three times or more.
    assert found["bigrams"]["repeated_rare"]["tokens"] == 5
    assert found["lambada"]["rows"] == 2


def test_training_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.txt").write_text("some text")
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_splits(tokens, {"train": ["some text"]}, train_bpe(["some text"], 260))
    assert main(["evaluate", "lm", str(folder), str(tmp_path / "a.txt"), "--train-tokens", str(tokens)]) == 2
    assert "are of another tokenizer than the model's" in capsys.readouterr().err
