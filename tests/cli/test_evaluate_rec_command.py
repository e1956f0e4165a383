"""`prism evaluate rec`: a table for people, JSON and a page for later, sentences for mistakes; runs and logs of all kinds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prism.cli import main
from prism.recommend.events import open_dataset, prepare_dataset
from prism.recommend.saved import training_of
from prism.recommend.task import train_rec
from tests.recommend.runs import small

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = small(tmp_path_factory.mktemp("rec"), steps=6, validation={"every": 0})
    return train_rec(settings).run


def words(capsys: Captured) -> str:
    """What was printed, wherever its lines were broken."""
    return " ".join(capsys.readouterr().out.split())


def evaluated(run: Path, out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", "rec", str(run), "--device", "cpu", "--output", str(out), *arguments]) == 0
    written: dict[str, Any] = json.loads((out / "results.json").read_text())
    return written["results"]


def test_figures_stand_beside_their_protocol(run: Path, tmp_path: Path, capsys: Captured) -> None:
    results = evaluated(run, tmp_path / "a")
    shown = words(capsys)
    assert "leave-one-out" in shown and "seen items left out" in shown and "at most 12 events read" in shown
    assert f"{results['metrics']['NDCG@10']:.4f}" in shown
    assert results["targets"] == 60 and results["protocol"]["max_length"] == 12
    page = (tmp_path / "a" / "report.html").read_text()
    assert "at most 12 events read" in page
    assert page.count('role="img"') >= 3, "with the run's loss"
    again = evaluated(run / "model", tmp_path / "b", "--batch", "7")
    assert again["metrics"] == pytest.approx(results["metrics"])
    other = evaluated(run, tmp_path / "c", "--split", "validation", "--max-length", "3", "--no-filter-seen")
    assert other["protocol"]["part"] == "validation" and not other["protocol"]["filter_seen"]
    assert "seen items ranked too, at most 3 events read" in words(capsys)


def test_sampled_figures_are_labelled(run: Path, tmp_path: Path, capsys: Captured) -> None:
    results = evaluated(run, tmp_path, "--sampled", "9", "--sampled-by", "popularity")
    assert all(name.startswith("sampled ") for name in results["metrics"])
    shown = words(capsys)
    assert "9 sampled items (popularity)" in shown and "sampled HR" in shown
    assert "sampled NDCG@10" in (tmp_path / "report.html").read_text()


def test_other_events_are_read_with_the_models_items(run: Path, tmp_path: Path, capsys: Captured) -> None:
    names = open_dataset(Path(training_of(run / "model").facts["folder"])).catalogue.items
    rows = [f"{user},{names[(user * 7 + n) % 50]},{n}" for user in range(8) for n in range(6)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time", *rows, "1,new thing,9"]) + "\n")
    results = evaluated(run, tmp_path / "out", "--data", str(tmp_path / "events.csv"))
    assert results["targets"] == 8 and results["protocol"]["items"] == len(names)
    assert "1 events of 1 items that the model does not know are dropped" in capsys.readouterr().err
    assert "other events" in (tmp_path / "out" / "report.html").read_text()


def test_the_training_events_must_be_the_same(run: Path, tmp_path: Path, capsys: Captured) -> None:
    moved = tmp_path / "model"
    shutil.copytree(run / "model", moved)
    stored = json.loads((moved / "training.json").read_text())
    stored["training_data"]["folder"] = str(tmp_path / "gone")
    (moved / "training.json").write_text(json.dumps(stored))
    assert main(["evaluate", "rec", str(moved), "--device", "cpu"]) == 0, "made again from its seed"
    stored["settings"]["data"]["synthetic"]["seed"] = 5
    (moved / "training.json").write_text(json.dumps(stored))
    capsys.readouterr()
    assert main(["evaluate", "rec", str(moved)]) == 2
    assert "have changed: give events with --data" in capsys.readouterr().err
    stored["settings"]["data"]["source"] = str(tmp_path / "gone.csv")
    (moved / "training.json").write_text(json.dumps(stored))
    assert main(["evaluate", "rec", str(moved)]) == 2
    assert "the training events are gone" in capsys.readouterr().err
    same = prepare_dataset(training_of(run / "model").data.recipe(), training_of(run / "model").data.cache)
    assert main(["evaluate", "rec", str(moved), "--device", "cpu", "--data", str(same.folder)]) == 0


def test_mistakes(run: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(run / "model", tmp_path / "bare")
    (tmp_path / "bare" / "training.json").unlink()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text('{"model_type": "prism"}')
    for arguments, sentence in (
        ([str(tmp_path / "none")], "there is no model folder"),
        ([str(tmp_path / "bare")], "has no training.json"),
        ([str(tmp_path / "text")], "holds no PRISM recommender: model_type in its config.json is 'prism'"),
        ([str(run), "--max-length", "0"], "max_length must be at least 1"),
        ([str(run), "--sampled", "0"], "sampled must be at least 1"),
        ([str(run), "--data", str(tmp_path / "no.csv")], "there is no file or folder"),
        ([str(run), "--output", str(tmp_path / "text" / "config.json")], "output must be a folder"),
    ):
        assert main(["evaluate", "rec", *arguments]) == 2
        said = capsys.readouterr().err
        assert sentence in said and "ranking" not in said, "refused before the progress bar"
