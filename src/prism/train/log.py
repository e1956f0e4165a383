"""The log: one JSON object a line, and TensorBoard events if asked for.

A resumed run first cuts the log back to its checkpoint's step, so that the log reads as if nothing had happened.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from prism.files import write_atomically


class Log:
    """Records up to `step` are kept, those after it belong to a run that was cut off."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.path = folder / "log.jsonl"
        kept = [record for record in read_log(self.path) if record["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", step) if tensorboard else None

    def write(self, step: int, **values: Any) -> None:
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"the log {self.path} could not be written ({error.strerror}): the checkpoints are untouched"
            ) from error
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:  # a full disk, already reported by the write before
            if error is None:
                raise
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All complete records; what a kill cut off in the middle is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("log.tensorboard needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=step + 1)
