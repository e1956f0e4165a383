"""Exported models are complete or absent, and damage is detected."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from prism.cli import main
from prism.files import check_weights
from prism.language.task import train_lm
from tests.train.runs import small

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train_lm(small(root, steps=2, model={"num_hidden_layers": 1}))
    return root / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
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
        f"every checkpoint in {run / 'checkpoints'} is damaged: to start over, give another run folder"
    )
    assert all("is damaged: state.json" in line for line in damaged if "step-" in line)


@given(place=st.integers(0, 10**9), victim=st.sampled_from(["model.safetensors", "manifest.json"]))
def test_any_flipped_byte_of_the_weights_is_detected(trained: Path, place: int, victim: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copytree(trained / "model", Path(folder) / "model"))
        check_weights(model)
        flip(model / victim, place % (model / victim).stat().st_size)
        with pytest.raises(ValueError, match=rf"model is damaged: {victim} .* or remove manifest.json if"):
            check_weights(model)


def test_commands_notice_damage_and_open_what_has_no_manifest(run: Path, capsys: Captured) -> None:
    model = run / "model"
    words = ["generate", str(model), "--prompt", "a", "--max-new-tokens", "2"]
    flip(model / "model.safetensors")
    for path in (run, model):
        assert main(["generate", str(path), *words[2:]]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "is damaged: model.safetensors does not match its SHA-256" in captured.err
    (model / "manifest.json").unlink()  # as older exports are
    assert main(words) == 0


def test_a_folder_that_is_no_run_is_not_exported(run: Path, capsys: Captured) -> None:
    for folder, sentence in (
        (run / "nowhere", f"{run / 'nowhere'} is not a run folder: it has no config.json"),
        (run / "model", "is not the config.json of a run"),
    ):
        assert main(["export", str(folder), "--out", str(run.parent / "out")]) == 2
        assert sentence in capsys.readouterr().err


def test_edited_text_files_are_no_damage(run: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = run / "model"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "mine": 1}))
    (model / "README.md").write_text("my model")
    assert main(["generate", str(model), "--prompt", "a", "--max-new-tokens", "2"]) == 0
    assert AutoModelForCausalLM.from_pretrained(model).config.mine == 1
