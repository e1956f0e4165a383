"""Prompts in batches: each row is written as if it were alone; an interrupted output is resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from prism.cli import main
from prism.language import batch as batches
from prism.language.batch import Journal, Prompt, continue_all, read_prompts
from prism.language.generate import LanguageModel, Sampling, Session, open_model
from tests.tiny_lm import save_lm

TEXTS = ["hello", "a longer prompt with more words", "x", "naïve 🙂", "two\twords", "b", "the end"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm"))


def alone(lm: LanguageModel, text: str, limit: int, sampling: Sampling, seed: int) -> str:
    session = Session(lm, seed)
    session.read(text)
    return "".join([*session.write(limit, sampling), session.text.flush()])


@pytest.mark.parametrize("layers", ["prism*2", "gated_delta+softmax"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_each_row_is_what_its_prompt_gives_alone(tmp_path: Path, layers: str, size: int) -> None:
    lm = open_model(save_lm(tmp_path, layers), "cpu")
    sampling = Sampling(0.9)
    prompts = [Prompt(index, text) for index, text in enumerate(TEXTS)]
    found = {c.prompt.index: c for c in continue_all(lm, prompts, 20, sampling, 3, size)}
    assert sorted(found) == list(range(len(TEXTS)))
    for prompt in prompts:
        assert found[prompt.index].text == alone(lm, prompt.text, 20, sampling, 3)
    assert len({c.text for c in found.values()}) == len(TEXTS)


def test_rows_that_end_make_room(folder: Path) -> None:
    """With an end token of high probability rows end at different times, and no more than `batch` run at once."""
    lm = open_model(folder, "cpu")
    with torch.no_grad():
        lm.model.lm_head.weight[lm.tokenizer.end] *= 20
    sampling, together = Sampling(0.7), list[int]()
    prompts = [Prompt(index, text) for index, text in enumerate(TEXTS * 2)]
    found = list(continue_all(lm, prompts, 60, sampling, 1, 4, stepped=lambda rows: together.append(rows) or False))
    assert len(found) == len(prompts) and max(together) == 4
    assert any(c.ended for c in found) and len({c.tokens for c in found}) > 2
    for c in found:
        assert c.text == alone(lm, c.prompt.text, 60, sampling, 1)


def rows_of(capsys: Captured, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
    assert main(["generate", *map(str, arguments)]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines_and_jsonl_give_the_same_rows(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "p.txt").write_text("\n".join(TEXTS) + "\n\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in TEXTS))
    options = ("--max-new-tokens", 8, "--seed", 4, "--batch", 3)
    rows = rows_of(capsys, folder, "--prompts", tmp_path / "p.txt", *options)
    assert rows == rows_of(capsys, folder, "--prompts", tmp_path / "p.jsonl", "--field", "question", *options)
    assert [row["prompt"] for row in rows] == TEXTS and [row["index"] for row in rows] == list(range(len(TEXTS)))
    out = tmp_path / "out.jsonl"
    assert rows_of(capsys, folder, "--prompts", tmp_path / "p.txt", *options, "--output", out) == []
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert not list(tmp_path.glob("*.partial"))


def test_an_interrupted_output_is_resumed(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("\n".join(TEXTS))
    options = (folder, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 9, "--batch", 2)
    whole = rows_of(capsys, *options)
    out, add = tmp_path / "out.jsonl", Journal.add

    def add_and_interrupt(self: Journal, row: dict[str, Any]) -> None:
        add(self, row)
        if len(self.rows) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "add", add_and_interrupt)
    rows_of(capsys, *options, "--output", out, code=130)
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    kept = [json.loads(line) for line in partial.read_text().splitlines()][1:]
    assert len(kept) >= 2
    partial.write_bytes(partial.read_bytes() + b'{"index": 6, "te')  # as after a crash within a line
    monkeypatch.setattr(Journal, "add", add)
    assert main(["generate", *map(str, options), "--output", str(out), "--seed", "9"]) == 2
    assert "other settings (seed)" in capsys.readouterr().err
    written: list[int] = []
    monkeypatch.setattr(Journal, "add", lambda self, row: (written.append(row["index"]), add(self, row)))
    rows_of(capsys, *options, "--output", out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == whole
    assert len(written) == len(TEXTS) - len(kept) and not partial.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "none.txt"), "there is no file none.txt"),
        (("--prompts", "p.txt", "--prompt", "a"), "--prompts and --prompt were both given"),
        (("--prompts", "p.txt", "--save-state", "a.safetensors"), "--save-state is for a single text"),
        (("--prompts", "p.txt", "--batch", "0"), "batch must be at least 1, got 0"),
        (("--prompts", "empty.txt"), "empty.txt holds no prompts"),
        (("--prompts", "rows.jsonl"), "has no text under 'prompt' (it has text)"),
        (("--prompts", "p.txt", "--output", "p.txt/x"), "p.txt"),
        (("--prompt", "a", "--output", "o.jsonl"), "--output is for --prompts"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a\n")
    Path("empty.txt").write_text("\n \n")
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    assert main(["generate", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_prompts_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("  a \r\nü\n".encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == ["  a ", "ü"]
    assert batches.prompts_sha256([Prompt(0, "a")]) != batches.prompts_sha256([Prompt(0, "b")])
