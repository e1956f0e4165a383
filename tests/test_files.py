"""Replaced folders: after an interruption either the old or the new one is complete."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prism.cli import main
from prism.files import fresh_folder, replace_folder, write_atomically
from prism.language.corpus import Recipe, prepare
from prism.recommend.events import EventRecipe, prepare_dataset


def folder(path: Path, content: str) -> Path:
    (fresh_folder(path) / "file").write_text(content)
    return path


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for content in ("one", "two"):
        replace_folder(folder(tmp_path / ".model.partial", content), tmp_path / "model")
        assert (tmp_path / "model" / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_in_no_folder_is_refused_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere to write x\.csv in: create it first"):
        write_atomically(tmp_path / "nowhere" / "x.csv", "")


def test_a_full_disk_is_said_with_the_file_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "made.csv"
    target.write_text("old")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def command() -> None:
        write_atomically(target, "new")

    monkeypatch.setattr("prism.files.sync", full)
    monkeypatch.setattr("prism.cli.rules.rules", command)
    assert main(["rules"]) == 2
    assert capsys.readouterr().err == f"prism rules: {target} cannot be written: No space left on device\n"
    assert [path.name for path in tmp_path.iterdir()] == ["made.csv"] and target.read_text() == "old"


def test_the_new_one_is_there_before_the_old_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = folder(tmp_path / "model", "old")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    partial = folder(tmp_path / ".model.partial", "new")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_folder(partial, final)
    assert (final / "file").read_text() == "new"
    replace_folder(folder(tmp_path / ".model.partial", "newer"), final)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "leftovers are removed"


def test_what_cannot_be_synced_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = folder(tmp_path / "model", "old")
    partial = folder(tmp_path / ".model.partial", "new")

    def full(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("prism.files.sync", full)
    with pytest.raises(OSError, match="No space"):
        replace_folder(partial, final)
    assert (final / "file").read_text() == "old"


@pytest.mark.parametrize(
    "make", [lambda cache: prepare(Recipe(), cache), lambda cache: prepare_dataset(EventRecipe(), cache)]
)
def test_a_read_only_cache_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    def refused(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr("prism.files.tempfile.TemporaryFile", refused)
    with pytest.raises(ValueError, match=r"cannot be written: permission denied; choose another path for data\.cache$"):
        make(tmp_path)
