"""Trackers: the real libraries without a network, one run id through resumes, and failures that stop nothing."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism.cli import main
from prism.language.task import train_lm
from prism.train import trackers
from prism.train.run import Log, read_log
from prism.train.trackers import IDS, Trackers
from tests.train.runs import small

Captured = pytest.CaptureFixture[str]


class Kept:
    """A tracker that keeps what it gets, and fails when told to."""

    def __init__(self, folder: Path, step: int, settings: dict[str, Any]) -> None:
        self.opened, self.got, self.closed = (step, settings), [], None
        self.fails_at: str | None = None

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.fails_at == "log":
            raise ConnectionError("the server is gone\nand more lines")
        self.got.append((step, values))

    def close(self, failed: bool) -> None:
        if self.fails_at == "close":
            raise TimeoutError
        self.closed = failed


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kept]:
    """Trackers that are opened in place of Weights & Biases and MLflow."""
    found: dict[str, Kept] = {}

    def opener(name: str) -> Any:
        def open_kept(*arguments: Any) -> Kept:
            found[name] = Kept(*arguments)
            return found[name]

        return open_kept

    monkeypatch.setattr(trackers, "_OPENERS", {name: opener(name) for name in ("wandb", "mlflow")})
    return found


def test_a_run_sends_what_it_logs_and_a_resumed_one_continues(tmp_path: Path, kept: dict[str, Kept]) -> None:
    settings = small(tmp_path, steps=4, log={"trackers": ["wandb"], "every": 1}, validation={"every": 0})
    train_lm(settings, report=lambda step, loss: None)
    first = kept["wandb"]
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert first.got == [(r.pop("step"), r) for r in [dict(record) for record in records]]
    assert first.opened[0] == 0 and first.opened[1]["steps"] == 4 and first.closed is False
    train_lm(replace(settings, steps=6), report=lambda step, loss: None)
    assert kept["wandb"].opened[0] == 4 and [step for step, _ in kept["wandb"].got] == [5, 6, 6]


@pytest.mark.parametrize("moment", ["open", "log", "close"])
def test_a_failing_tracker_is_reported_once_and_stops_nothing(
    tmp_path: Path, kept: dict[str, Kept], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    if moment == "open":
        monkeypatch.setitem(trackers._OPENERS, "mlflow", lambda *_: 1 / 0)
    both = Trackers(["mlflow", "wandb"], tmp_path, 0, report=said.append)
    if moment != "open":
        kept["mlflow"].fails_at = moment
    for step in range(3):
        both.log(step, {"loss": 1.0, "note": None, "bad": float("nan"), "flag": True})
    both.close()
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("mlflow failed and gets no more metrics of this run, which continues: ")
    assert kept["wandb"].got == [(step, {"loss": 1.0}) for step in range(3)] and kept["wandb"].closed is False


def test_a_failed_run_is_closed_as_failed(tmp_path: Path, kept: dict[str, Kept]) -> None:
    with pytest.raises(KeyboardInterrupt), Log(tmp_path, 0, ["wandb"]):
        raise KeyboardInterrupt
    assert kept["wandb"].closed is True


@pytest.mark.parametrize(("name", "extra"), [("wandb", "trackers"), ("mlflow", "trackers"), ("tensorboard", "lm")])
def test_a_missing_package_is_one_sentence(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", "lm", "--out", str(tmp_path / "run"), "--log.trackers", name]) == 2
    said = capsys.readouterr().err.strip()
    assert (
        f"log.trackers has {name}, which needs {name}, from the extra {extra}: pip install" in said and "\n" not in said
    )
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log.trackers must be one of tensorboard, wandb, mlflow, got \['comet'\]"):
        small(tmp_path, log={"trackers": ["comet"]})


def test_wandb_offline_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for step in (0, 2):
        with Log(tmp_path, step, ["wandb"]) as log:
            log.write(step + 1, loss=3.0 - step)
            log.write(step + 1, validation_nats=2.5)
        ids.append(json.loads((tmp_path / IDS).read_text())["wandb"])
    assert ids[0] == ids[1]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}*/*.wandb"))
    assert files and any(b"validation_nats" in file.read_bytes() for file in files)


@pytest.mark.slow  # importing mlflow takes seconds
def test_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"steps": 4, "optimizer": {"lr": 0.1}}}))
    for step in (0, 2):
        with Log(tmp_path, step, ["mlflow"]) as log:
            for later in (1, 2):
                log.write(step + later, loss=4.0 - step - later, note=None)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "prism"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((tmp_path / IDS).read_text())["mlflow"] and run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 3),
        (2, 2),
        (3, 1),
        (4, 0),
    ]
    assert run.data.params == {"steps": "4", "optimizer.lr": "0.1"}


def test_mlflow_waits_for_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls return while the server does not answer; what it answers in the end is reported."""
    answer = threading.Event()

    def start(*_: Any) -> None:
        answer.wait(60)
        raise ConnectionError("refused")

    monkeypatch.setattr(trackers._Mlflow, "_start", start)
    said: list[str] = []
    found = Trackers(["mlflow"], tmp_path, 0, report=said.append)
    for step in range(3):
        found.log(step, {"loss": 1.0})
    assert not said
    answer.set()
    found.close()
    assert len(said) == 1 and said[0].endswith("continues: refused")
