"""A checkpoint as one folder that others open: the model, what turns its inputs and outputs into words, README.md."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from prism.files import seal_weights, whole_folder
from prism.train.checkpoint import Checkpoint
from prism.train.run import CONFIG, stored_config

Writer = Callable[[Path, Checkpoint, Path], None]
"""(run, checkpoint, empty folder): what `Task.write_model` is."""

WRITERS = {"lm": "prism.train.language_export:write_model", "rec": "prism.train.rec_export:write_model"}
"""By kind of run."""


def export(run: Path, checkpoint: Checkpoint, out: Path) -> Path:
    """Write the model of any run's checkpoint, gathered from however many shards it has, to `out`."""
    stored = stored_config(run)
    if stored is None:
        raise ValueError(f"{run} is not a run folder: it has no {CONFIG}")
    module, function = WRITERS[stored["task"]].split(":")
    return write_export(getattr(import_module(module), function), run, checkpoint, out)


def write_export(write: Writer, run: Path, checkpoint: Checkpoint, out: Path) -> Path:
    """What `write` makes of a checkpoint, whole or not at all, in place of what was there."""
    with whole_folder(out, "the model") as folder:
        write(run, checkpoint, folder)
        seal_weights(folder)
    return out
