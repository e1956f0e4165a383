"""Exported models: whole or absent, and what is damaged is noticed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from runs import small
from safetensors import SafetensorError

from prism.cli import main
from prism.train.language import train_lm

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train_lm(small(root, steps=2, model={"num_hidden_layers": 1}))
    return root / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    full: Exception, trained: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_file(tensors: object, path: Path, *rest: object, **more: object) -> None:
        Path(path).write_bytes(b"half of it")
        raise full

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", save_file)
    assert main(["export", str(trained), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the model could not be written to" in said and "(No space left on device): free some space" in said
    assert len(said.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def flip(path: Path, place: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place - 1] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    "words", ["generate RUN --prompt a", "evaluate lm RUN FILE", "export RUN", "train lm --out RUN"]
)
def test_every_command_says_that_all_checkpoints_are_damaged(words: str, run: Path, capsys: Captured) -> None:
    shutil.rmtree(run / "model")
    (run.parent / "text.txt").write_text("some text")
    for state in run.glob("checkpoints/*/state.json"):
        flip(state)
    places = {"RUN": str(run), "FILE": str(run.parent / "text.txt")}
    assert main([places.get(word, word) for word in words.split()]) == 2
    *damaged, last = capsys.readouterr().err.splitlines()
    assert last.endswith(
        f"every checkpoint in {run / 'checkpoints'} is damaged: to start anew, give another run folder"
    )
    assert all("is damaged: state.json" in line for line in damaged if "step-" in line)
