"""A checkpoint as one folder that others open: the model, what turns its inputs and outputs into words, README.md."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prism.files import read_json, seal_weights, whole_folder
from prism.train.checkpoint import Checkpoint, all_damaged, checkpoint_names, chosen_by, find_newest_good
from prism.train.run import CONFIG

Writer = Callable[[Path, Checkpoint, Path], None]
"""(run, checkpoint, empty folder): writes the model there. `Task.write_model` is one."""


def write_export(write: Writer, run: Path, checkpoint: Checkpoint, out: Path) -> Path:
    """What `write` makes of a checkpoint, whole or not at all, in place of what was there."""
    with whole_folder(out, "the model") as folder:
        write(run, checkpoint, folder)
        seal_weights(folder)
    return out


# The model that a path stands for: a folder that transformers opens, or a run, finished or not.


@contextmanager
def model_folder(path: Path, write: Writer, report: Callable[[str], None] = lambda message: None) -> Iterator[Path]:
    """The folder to open. Of a run: its `model`, or if a checkpoint is newer, what the run would become now, exported for the
    time being."""
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
        task = config.get("task", "lm")
        raise ValueError(
            f"{path} is a run without a checkpoint: let `prism train {task} --out {path}` go on until it has one"
        )
    chosen = chosen_by(newest)
    report(f"using checkpoint {chosen.folder.name} of {path}")
    with tempfile.TemporaryDirectory() as folder:
        yield write_export(write, path, chosen, Path(folder) / path.resolve().name)
