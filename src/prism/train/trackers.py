"""Send a run's metrics to TensorBoard, Weights & Biases and MLflow, besides its log.jsonl.

Design choices
- A tracker never stops a run. The first failure of one is reported, and it is closed; the log and the other trackers continue.
  Only a package that is not installed is an error, before the run starts.
- A resumed run continues the same run of a tracker: its id is in the run folder, in trackers.json.
- Where metrics go is said as each tool's users are used to: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and so on. Without a
  tracking URI MLflow's files are in the run folder, in mlruns.
- Weights & Biases sends in a separate process. MLflow would wait for its server in every call, so a thread calls it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from prism.files import read_json, write_json
from prism.messages import missing_extra, say

IDS = "trackers.json"
"""The file of a run folder with the ids of its runs, by tracker."""
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""The package that each tracker needs."""
_LOCK = Lock()
_CLOSING = 30.0
"""Seconds that the end of a run waits for metrics on their way."""


class Tracker(Protocol):
    """Where metrics are sent. Any method may raise anything."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError for a tracker whose package is not installed."""
    for name in names:
        if find_spec(PACKAGES[name]) is None:
            absent = ModuleNotFoundError(f"No module named {PACKAGES[name]!r}", name=PACKAGES[name])
            raise ValueError(f"log.trackers has {name}, which {missing_extra(absent, 'trackers')}")


class Trackers:
    """The trackers of a run, opened at a step: 0, or the checkpoint that the run resumes from.

    Args:
        settings: the run's settings, for the trackers to show.
        report: called with a sentence when a tracker fails.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        step: int,
        settings: dict[str, Any] | None = None,
        report: Callable[[str], None] = say,
    ) -> None:
        self._report, self._open = report, dict[str, Tracker]()
        for name in dict.fromkeys(names):
            opened = self._guard(name, _OPENERS[name], folder, step, settings or {})
            if opened is not None:
                self._open[name] = opened

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Send the numbers among the values."""
        numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.log, step, numbers)

    def close(self, failed: bool = False) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.close, failed)
        self._open.clear()

    def _guard(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Run an action of a tracker; if it fails, say so and do without the tracker."""
        try:
            return action(*arguments)
        except Exception as error:  # of a network, a server, a full disk: nothing that a run depends on
            self._open.pop(name, None)
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._report(f"{name} failed and gets no more metrics of this run, which continues: {why}")
            return None


class _TensorBoard:
    def __init__(self, folder: Path, step: int, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, step: int, settings: dict[str, Any]) -> None:
        import wandb

        known = _stored_id(folder, "wandb")
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "prism"),
            id=known,
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            resume="allow" if known else None,
            dir=str(folder),
            config=settings,
            settings=wandb.Settings(console="off"),
        )
        self._run: Any = run
        _store_id(folder, "wandb", self._run.id)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    """MLflow's client in a thread, in the order of the calls. A failure there is raised by the next call here."""

    def __init__(self, folder: Path, step: int, settings: dict[str, Any]) -> None:
        self._thread = ThreadPoolExecutor(1, "mlflow")
        self._waiting: list[Future[None]] = []
        self._submit(self._start, folder, settings)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._raise_failures()
        self._submit(self._send, step, values, time.time_ns() // 1_000_000)

    def close(self, failed: bool) -> None:
        self._submit(self._finish, failed)
        wait(self._waiting, _CLOSING)
        late = sum(not done.done() for done in self._waiting)
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._raise_failures()
        if late:
            raise TimeoutError(f"{late} records were not sent within {_CLOSING:.0f} s")

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self._waiting.append(self._thread.submit(function, *arguments))

    def _raise_failures(self) -> None:
        done = [future for future in self._waiting if future.done()]
        self._waiting = [future for future in self._waiting if not future.done()]
        for future in done:
            future.result()

    def _start(self, folder: Path, settings: dict[str, Any]) -> None:
        import mlflow

        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # later versions refuse files without it
            address = (folder.resolve() / "mlruns").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=address)
        known = _stored_id(folder, "mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "prism")
        found = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(place, run_name=folder.resolve().name).info.run_id
        _store_id(folder, "mlflow", self._id)
        parameters = [mlflow.entities.Param(name, str(value)[:500]) for name, value in _flat(settings)]
        for start in range(0, len(parameters), 100):  # the most that a server takes at once
            self._client.log_batch(self._id, params=parameters[start : start + 100])

    def _send(self, step: int, values: dict[str, float], now: int) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def _finish(self, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


_OPENERS: dict[str, Callable[[Path, int, dict[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def _stored_id(folder: Path, name: str) -> str | None:
    path = folder / IDS
    found: str | None = read_json(path).get(name) if path.is_file() else None
    return found


def _store_id(folder: Path, name: str, value: str) -> None:
    path = folder / IDS
    with _LOCK:  # MLflow's thread writes it too
        write_json(path, {**(read_json(path) if path.is_file() else {}), name: value})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as pairs of a dotted name and a value."""
    found: list[tuple[str, Any]] = []
    for name, value in settings.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found
