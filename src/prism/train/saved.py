"""The model that a path stands for: a folder that transformers opens, or a run, finished or not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prism.data.files import read_json
from prism.train.checkpoint import find_newest_good
from prism.train.export import export
from prism.train.run import CONFIG


@contextmanager
def model_folder(path: Path, report: Callable[[str], None] = lambda message: None) -> Iterator[Path]:
    """The folder to open. Of a run: its `model`, or if a checkpoint is newer, that one, exported for the time being."""
    if not _is_run(path):
        yield path
        return
    model, newest = path / "model", find_newest_good(path / "checkpoints", report)
    if model.is_dir() and (newest is None or model.stat().st_mtime >= newest.folder.stat().st_mtime):
        yield model
        return
    if newest is None:
        raise ValueError(
            f"{path} is a run without a checkpoint: let `prism train lm --out {path}` go on until it has one"
        )
    report(f"using checkpoint {newest.folder.name} of {path}")
    with tempfile.TemporaryDirectory() as folder:
        yield export(path, newest, Path(folder) / path.resolve().name)


def _is_run(path: Path) -> bool:
    config = path / CONFIG
    return config.is_file() and "settings" in read_json(config)
