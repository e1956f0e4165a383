"""Folders of recommenders: what they replace, what of their training they keep, and damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from prism.cli import main
from prism.recommend import Recommender
from prism.recommend.events.synthetic import synthetic_dataset

QUICK: dict[str, Any] = {
    "steps": 2,
    "device": "cpu",
    "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 1},
    "data": {"length": 10},
    "batch": {"sequences": 8},
    "validation": {"epochs": 0, "patience": 0},
}


@pytest.fixture(scope="module")
def fitted() -> Recommender:
    dataset = synthetic_dataset(users=30, items=100, events=600, seed=3)
    users = [user for user, events in enumerate(dataset.histories.lengths) for _ in range(events)]
    items = dataset.catalogue.names(dataset.histories.items)
    frame = pl.DataFrame({"user": users, "item": items, "time": dataset.histories.times})
    return Recommender.fit(frame, log={"every": 1}, **QUICK)  # `log` is a section of the settings


def test_only_recommenders_are_replaced(fitted: Recommender, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    fitted.save(tmp_path / "model")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds thesis\.txt, which is no part of a recommender"):
        fitted.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ValueError, match="holds mine"):
        fitted.save(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        fitted.save(tmp_path / "mine" / "thesis.txt")


def test_a_saved_recommender_is_evaluated(
    fitted: Recommender, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted.save(tmp_path / "model")
    Recommender.load(tmp_path / "model", device="cpu").save(tmp_path / "copy")
    arguments = ["evaluate", "rec", str(tmp_path / "copy"), "--device", "cpu"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["results"]["targets"] == 30

    fitted.save(tmp_path / "without", histories=False)
    capsys.readouterr()
    assert main(["evaluate", "rec", str(tmp_path / "without"), "--device", "cpu"]) == 2
    assert "trained on a DataFrame that is not saved with it: give events with --data" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the model has no histories"):
        Recommender.load(tmp_path / "without", device="cpu").recommend(users=[1])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "items.json", "users.json", "events.safetensors"])
def test_damaged_folders_are_refused_by_name(fitted: Recommender, tmp_path: Path, name: str) -> None:
    fitted.save(tmp_path / "model")
    damaged = tmp_path / "model" / name
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"model/?\S* (is damaged|does not open as a model): "):
        Recommender.load(tmp_path / "model", device="cpu")


def test_a_folder_without_a_model_is_refused(fitted: Recommender, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    for name in ("config.json", "model.safetensors", "items.json"):
        shutil.copytree(tmp_path / "model", tmp_path / "copy", dirs_exist_ok=True)
        (tmp_path / "copy" / name).unlink()
        with pytest.raises((ValueError, FileNotFoundError), match=name):
            Recommender.load(tmp_path / "copy", device="cpu")
