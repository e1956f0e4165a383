"""Export a checkpoint as a model folder with a model card, and find the model folder that a path stands for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from prism.files import read_json, seal_weights, whole_folder
from prism.overrides import command_of
from prism.train import tensors
from prism.train.checkpoint import Checkpoint, all_damaged, checkpoint_names, chosen_by, find_newest_good
from prism.train.distributed import World
from prism.train.run import CONFIG, read_log, stored_config, stored_settings
from prism.train.settings import RunSettings

S = TypeVar("S", bound=RunSettings)
Writer = Callable[[Path, Checkpoint, Path], None]
"""(run, checkpoint, empty folder): writes the model there. `Task.write_model` is one."""


def write_export(write: Writer, run: Path, checkpoint: Checkpoint, out: Path) -> Path:
    """Write the model of a checkpoint to `out`, completely or not at all, replacing an existing folder."""
    with whole_folder(out, "the model") as folder:
        write(run, checkpoint, folder)
        seal_weights(folder)
    return out


@contextmanager
def resolve_model_folder(
    path: Path, write: Writer, report: Callable[[str], None] = lambda message: None
) -> Iterator[Path]:
    """The model folder to open for a path.

    A model folder is returned as it is. For a run it is its `model` folder or, if there is a newer checkpoint, a temporary
    export of that checkpoint.
    """
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    if "settings" not in config:
        yield path
        return
    model, newest = path / "model", find_newest_good(path / "checkpoints", report)
    if model.is_dir() and (newest is None or model.stat().st_mtime >= newest.folder.stat().st_mtime):
        yield model
        return
    if newest is None and checkpoint_names(path / "checkpoints"):
        raise all_damaged(path / "checkpoints")
    if newest is None:
        command = command_of(config["task"])
        raise ValueError(
            f"{path} is a run without a checkpoint: resume it with `{command} --out {path}` until it has one"
        )
    chosen = chosen_by(newest)
    report(f"using checkpoint {chosen.folder.name} of {path}")
    with tempfile.TemporaryDirectory() as folder:
        yield write_export(write, path, chosen, Path(folder) / path.resolve().name)


@dataclass(frozen=True)
class TrainedRun(Generic[S]):
    """A run at one of its checkpoints: what the exports of all tasks read and write."""

    name: str
    settings: S
    config: dict[str, Any]
    """The contents of config.json."""
    checkpoint: Checkpoint
    records: list[dict[str, Any]]
    """The log up to the checkpoint."""

    @classmethod
    def open(cls, run: Path, checkpoint: Checkpoint, task: str, blank: S) -> TrainedRun[S]:
        """Read a run folder; `blank` are the task's default settings."""
        settings, config = stored_settings(run, task, blank), stored_config(run)
        assert settings is not None and config is not None
        records = [record for record in read_log(run / "log.jsonl") if record["step"] <= checkpoint.state["step"]]
        return cls(run.resolve().name, settings, config, checkpoint, records)

    def load(self, model: nn.Module) -> int:
        """Load the checkpoint's weights into a model on the CPU; returns its number of parameters."""
        tensors.load(self.checkpoint.tensors, model, None, World(torch.device("cpu")))
        return sum(parameter.numel() for parameter in model.parameters())


def model_card(
    name: str,
    metadata: str,
    summary: str,
    facts: dict[str, str],
    settings: RunSettings,
    state: dict[str, Any],
    records: list[dict[str, Any]],
    command: str,
    evaluation: str,
    use: str,
    limits: str,
) -> str:
    """The README.md of an exported model.

    Args:
        metadata: YAML for the model hub.
        facts: the task's rows of the table about training.
        state: of the checkpoint.
        records: the log up to the checkpoint.
        command: trains the same model again.
        use: Python code.
    """
    rows = {
        **facts,
        "optimizer": f"{settings.optimizer.name}, learning rate {settings.optimizer.lr:g}, {settings.schedule.name}",
        "training loss": _training_loss(records),
        "skipped steps": state["skipped"],
        "seed": settings.seed,
    }
    table = "\n".join(f"| {row} | {value} |" for row, value in rows.items())
    return f"""---
{metadata}
---

# {name}

{summary}

## Training

| | |
|---|---|
{table}

```sh
{command}
```

## Evaluation

{evaluation}

## Use

```python
{use}
```

## Limits

{limits}

## Licence

The code that made the model is Apache-2.0. What may be done with the weights depends on the data they were trained on.
"""


def _training_loss(records: list[dict[str, Any]]) -> str:
    losses = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    if not losses:
        return "not logged"
    (first_step, first), (last_step, last) = losses[0], losses[-1]
    return f"{first:.4f} nats at step {first_step:,}, {last:.4f} at step {last_step:,}"
