"""A checkpoint is whole or absent: damage is found and named, a full disk harms nothing, NaN is never saved."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from prism import files
from prism.files import find_damage
from prism.language.task import train_lm
from prism.train import checkpoint as checkpoints
from prism.train import tensors as tensor_files
from prism.train.checkpoint import Checkpoints, NotFiniteError
from prism.train.distributed import World
from tests.children import final_tensors, same_tensors
from tests.train.runs import losses, small
from tests.train.standin import build_with_dropout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    train_lm(small(root), build_with_dropout)
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run that a test may spoil, without its last checkpoint: there is something left to do."""
    for name in ("run", "corpus", "cache"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def settings_of(root: Path, trained: Path):
    """The copied run, on the tokens of the original (a copied corpus has other times)."""
    return small(root, data={"sources": [str(trained / "corpus")], "cache": str(trained / "cache")})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("pattern", ["tensors/*.safetensors", "rng/*.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    root: Path, trained: Path, pattern: str, damage, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = root / "run" / "checkpoints" / "step-00000024"
    (victim,) = newest.glob(pattern)
    damage(victim)
    outcome = train_lm(settings_of(root, trained), build_with_dropout)
    said = capsys.readouterr().err
    assert f"checkpoint step-00000024 is damaged: {victim.relative_to(newest)} " in said
    assert "resuming from step-00000018" in said
    assert outcome.step == 24 and find_damage(newest) is None, "the steps were trained again and saved again"
    assert same_tensors(final_tensors(root / "run"), final_tensors(trained / "run"))
    assert losses(root / "run") == losses(trained / "run")


def test_when_all_are_damaged_nothing_is_started_over(root: Path, trained: Path) -> None:
    for folder in (root / "run" / "checkpoints").iterdir():
        flip(folder / "state.json")
    log = (root / "run" / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged: to start over, give another run folder"):
        train_lm(settings_of(root, trained), build_with_dropout)
    assert (root / "run" / "log.jsonl").read_bytes() == log
    with pytest.raises(ValueError, match="is damaged"):
        train_lm(settings_of(root, trained), build_with_dropout)  # asking again does not help


def test_only_the_newest_are_kept_and_nothing_is_a_pickle(trained: Path) -> None:
    folder = trained / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000018", "step-00000024"]
    inside = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in inside} == {".safetensors", ".json"}
    for path in inside:
        with pytest.raises(Exception):  # noqa: B017  (whatever it says, it must not load)
            pickle.loads(path.read_bytes())


@pytest.mark.parametrize("where", ["tensors", "sync", "manifest"])
def test_a_full_disk_ends_the_run_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    settings = small(tmp_path)
    full = OSError(28, "No space left on device")

    def after_step_6(original):
        def write(target, *rest):
            if "step-00000012" in str(getattr(target, "path", target)):
                raise full
            return original(target, *rest)

        return write

    if where == "tensors":
        writer = dcp.HuggingFaceStorageWriter
        monkeypatch.setattr(writer, "write_data", after_step_6(writer.write_data))
    elif where == "sync":
        monkeypatch.setattr(checkpoints, "sync", after_step_6(files.sync))
    else:
        monkeypatch.setattr(checkpoints, "write_json", after_step_6(files.write_json))
    with pytest.raises(
        OSError,
        match=r"step-00000012 could not be written to .* \(No space left on device\): the last good "
        r"checkpoint, step-00000006, is unchanged; free some space and run the same command",
    ):
        train_lm(settings, build_with_dropout)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000006"], "the failed attempt gave its space back"
    assert find_damage(folder / "step-00000006") is None

    monkeypatch.undo()
    assert train_lm(settings, build_with_dropout).step == 24


def test_tensors_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    place = Checkpoints(tmp_path, 2, World(torch.device("cpu")))
    for value in (float("nan"), float("inf")):
        with pytest.raises(NotFiniteError, match=r"^model.x is not finite: checkpoint step-00000001 is not written$"):
            place.save({"model.y": torch.ones(2), "model.x": torch.tensor([1.0, value])}, {}, {"step": 1})
    assert not list(tmp_path.iterdir())


def test_weights_of_another_model_are_refused(trained: Path) -> None:
    class Other(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(320, width)

    folder, world = trained / "run" / "checkpoints" / "step-00000024" / "tensors", World(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"tensors has model\.calls and \d+ more, unlike the model"):
        tensor_files.load(folder, Other(16), None, world)
    model = build_with_dropout(small(trained).model, 384, 0)
    with pytest.raises(ValueError, match=r"model.embed.weight has shape \[320, 16\], the model expects \[384, 16\]"):
        tensor_files.load(folder, model, None, world)
