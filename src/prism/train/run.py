"""The run folder: who may use it, what was started in it, and what must stay the same when it goes on.

runs/lm/
  config.json        settings, and what a resumed run must find unchanged
  tokenizer.json
  log.jsonl
  checkpoints/
  model/             the trained model, for transformers
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from prism.data.files import read_json, write_atomically, write_json
from prism.data.prepare import Corpus
from prism.train.distributed import World
from prism.train.overrides import override, to_plain
from prism.train.settings import Settings

CONFIG = "config.json"


def identity(settings: Settings, corpus: Corpus, vocab_size: int) -> dict[str, Any]:
    """What decides the weights' shapes and which sample comes when. The rest may change between resumes."""
    model = {f"model.{name}": value for name, value in to_plain(settings.model).items()}
    for free in ("weights", "gradient_checkpointing"):
        del model[f"model.{free}"]
    return {
        **model,
        "model.vocab_size": vocab_size,
        "seed": settings.seed,
        "data.context": settings.data.context,
        "data.separate_documents": settings.data.separate_documents,
        "batch.sequences": settings.batch.sequences,
        "optimizer.name": settings.optimizer.name,
        "tokenizer": corpus.manifest.tokenizer_sha256,
        "tokens": corpus.manifest.digest,
    }


def stored_settings(folder: Path) -> Settings | None:
    """What the run in this folder was last started with; None if there is no run."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    stored = read_json(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("settings"), dict):
        raise ValueError(f"{path} is not the settings file of a run")
    return override(Settings(), stored["settings"], str(path))


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse, before anything is written, a folder that this run must not touch."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give another run folder with --out")
    if not folder.exists() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    if not resume:
        raise ValueError(f"{folder} is not empty and --no-resume was given: give another run folder with --out")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not empty and holds no run: give another run folder with --out")


@contextmanager
def open_run(settings: Settings, corpus: Corpus, vocab_size: int, world: World) -> Iterator[Path]:
    """The folder, made or found fitting, and kept by this run alone while it lasts."""
    folder = settings.out
    mine = identity(settings, corpus, vocab_size)
    lock = FileLock(folder / ".lock", timeout=0)

    def claim() -> None:
        check_folder(folder, settings.resume)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another process is training in {folder}") from None
        if (folder / CONFIG).is_file():
            _check_identity(read_json(folder / CONFIG)["identity"], mine, folder)
        write_atomically(folder / "tokenizer.json", corpus.tokenizer_file.read_bytes())
        split = corpus.manifest.splits["train"]
        seen = {"documents": split.documents, "tokens": split.tokens, "text_bytes": split.text_bytes}
        write_json(folder / CONFIG, {"settings": to_plain(settings), "identity": mine, "training_data": seen})

    try:
        world.on_main(claim)
        yield folder
    finally:
        if world.main:
            lock.release()


def _check_identity(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f"the run in {folder} was started with {name} {before.get(name)}, now it is {value}: "
                "keep it to go on, or give another run folder with --out"
            )
