"""`prism generate`: where the text comes from, where it goes, and how it is resumed."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prism.cli import main
from prism.language.generate import Session
from tests.tiny_lm import save_lm

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm"))


def generate(capsys: Captured, *arguments: object) -> str:
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [("--temperature", 0), ("--seed", 5, "--top-k", 40)], ids=["greedy", "sampled"])
def test_three_runs_write_what_one_writes(
    folder: Path, tmp_path: Path, capsys: Captured, options: tuple[object, ...]
) -> None:
    whole = generate(capsys, folder, "--prompt", "naïve 🙂", "--max-new-tokens", 45, *options)
    state = tmp_path / "state.safetensors"
    later = [option for option in options if option not in ("--seed", 5)]  # the random state is resumed
    parts = [generate(capsys, folder, "--prompt", "naïve 🙂", "--max-new-tokens", 14, *options, "--save-state", state)]
    parts += [generate(capsys, folder, "--state", state, "--max-new-tokens", 15, *later, "--save-state", state)]
    parts += [generate(capsys, folder, "--state", state, "--max-new-tokens", 16, *later)]
    assert "".join(parts) == whole
    assert len(set(whole)) > 8
    again = generate(capsys, folder, "--state", state, "--max-new-tokens", 16, *later, "--seed", 5)
    assert (again == parts[-1]) == (options[1] == 0), "a seed starts other random numbers"


def test_memories_in_bfloat16_are_half_as_large(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    sizes, options = [], ("--prompt", "hello", "--max-new-tokens", 2, "--temperature", 0)
    for number, more in enumerate([(), ("--state-dtype", "bfloat16")]):
        generate(capsys, folder, *options, *more, "--save-state", tmp_path / f"{number}.safetensors")
        sizes.append(
            sum(z.nbytes for name, z in load_file(tmp_path / f"{number}.safetensors").items() if "memory" in name)
        )
    assert sizes[0] == 2 * sizes[1] > 0
    resumed = tmp_path / "1.safetensors"
    generate(capsys, folder, "--state", resumed, "--max-new-tokens", 2, "--save-state", resumed)
    assert {z.dtype for name, z in load_file(resumed).items() if "memory" in name} == {torch.bfloat16}


def test_prompt_file_and_standard_input_are_the_same_text(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("hello\n")

    def from_input(*arguments: object) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
        return generate(capsys, folder, *arguments)

    texts = {
        generate(capsys, folder, "--prompt", "hello\n"),
        generate(capsys, folder, "--file", tmp_path / "prompt.txt"),
        from_input(),
        from_input("--file", "-"),
    }
    assert len(texts) == 1


def test_only_the_text_goes_to_the_output(folder: Path, capsys: Captured) -> None:
    assert main(["generate", str(folder), "--prompt", "abc", "--max-new-tokens", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert "[0 tokens, state of" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "x"], "there is no model folder nowhere"),
        (["MODEL", "--prompt", "x", "--file", "y"], "--prompt and --file were both given"),
        (["MODEL", "--prompt", "a\udcff"], "prompt cannot be encoded as UTF-8: surrogates not allowed at 1"),
        (["MODEL", "--file", "nowhere.txt"], "there is no file nowhere.txt"),
        (["MODEL", "--prompt", "x", "--state", "nowhere.safetensors"], "there is no state file nowhere.safetensors"),
        (["MODEL", "--prompt", "x", "--save-state", "state.pt"], "must be a file name that ends in .safetensors"),
        (["MODEL", "--prompt", "x", "--save-state", "nowhere/s.safetensors"], "there is no folder nowhere"),
        (["MODEL", "--prompt", "x", "--max-new-tokens", "-1"], "max_new_tokens must be at least 0"),
        (["MODEL", "--prompt", "x", "--top-p", "2"], "top_p must be above 0 and at most 1"),
        (["MODEL", "--prompt", "x", "--device", "abacus"], "device 'abacus' cannot be used here"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    folder: Path, capsys: Captured, arguments: list[str], message: str
) -> None:
    assert main(["generate", *(str(folder) if word == "MODEL" else word for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_text_that_is_not_utf8(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert main(["generate", str(folder), "--file", str(tmp_path / "latin.txt")]) == 2
    assert "latin.txt is not UTF-8 text" in capsys.readouterr().err


def test_an_interrupted_text_is_saved_and_goes_on(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generate(capsys, folder, "--prompt", "abc", "--max-new-tokens", 30)
    state, write = tmp_path / "state.safetensors", Session.write

    def interrupted(session: Session, *arguments: Any) -> Iterator[str]:
        for i, piece in enumerate(write(session, *arguments)):
            if i == 10:
                signal.raise_signal(signal.SIGINT)
            yield piece

    monkeypatch.setattr(Session, "write", interrupted)
    words = ["generate", str(folder), "--prompt", "abc", "--max-new-tokens", "30", "--save-state", str(state)]
    assert main(words) == 130
    first = capsys.readouterr()
    assert "interrupted, saved to" in first.err
    monkeypatch.undo()
    assert first.out + generate(capsys, folder, "--state", state, "--max-new-tokens", 19) == whole
