"""Small runs of language models, in this process or in children that can be killed."""

from __future__ import annotations

import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from prism.language.model import Builder
from prism.language.settings import Settings
from prism.language.task import train_lm
from prism.language.tokens import StreamWriter
from prism.overrides import override
from prism.train import loop
from prism.train.run import read_log
from tests.children import start_children
from tests.train.standin import build_plain


def write_corpus(folder: Path) -> Path:
    """A folder with enough documents that some are held out, and texts that a model can learn something from."""
    folder.mkdir(parents=True)
    lines = [f'{{"text": "{i} bottles, take {i % 7} down, {i - i % 7} bottles left"}}' for i in range(400)]
    (folder / "songs.jsonl").write_text("\n".join(lines))
    return folder


def small(root: Path, **changes: Any) -> Settings:
    """Settings of a run that takes a second; `changes` are nested as in a TOML file."""
    corpus = root / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    base = {
        "out": str(root / "run"),
        "steps": 24,
        "device": "cpu",
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 1, "head_dim": None},
        "data": {"sources": [str(corpus)], "cache": str(root / "cache"), "context": 16},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 4},
        "validation": {"every": 8, "sequences": 6},
        "checkpoint": {"every": 6},
        "log": {"every": 1},
    }
    return override(override(Settings(), base, "base"), changes, "changes")


def losses(run: Path) -> list[tuple[int, float | None]]:
    """The log's loss, gradient norm and validation loss of every step: all that does not depend on the clock."""
    records = read_log(run / "log.jsonl")
    return [(r["step"], r.get("loss"), r.get("gradient_norm"), r.get("validation_nats")) for r in records]


def start(
    settings: Settings,
    build: Builder = build_plain,
    processes: int = 1,
    slow: str | None = None,
    on_device: bool = False,
) -> list[BaseProcess]:
    """Train in children.

    Args:
        slow: gives time to meet them at their "tokens" or "steps".
        on_device: the device decides to skip a step, as on a GPU.
    """
    return start_children(_train, settings, build, slow, on_device, processes=processes)


def _train(settings: Settings, build: Builder, slow: str | None, on_device: bool) -> None:
    loop.decides_on_device = lambda _: on_device
    if slow == "tokens":
        append = StreamWriter.append

        def slow_append(self: StreamWriter, tokens: Any) -> None:
            time.sleep(0.005)
            append(self, tokens)

        StreamWriter.append = slow_append
    plain = build

    def build_slow(*arguments: Any) -> torch.nn.Module:
        model = plain(*arguments)
        model.register_forward_pre_hook(lambda *_: time.sleep(0.005))
        return model

    train_lm(settings, build_slow if slow == "steps" else build)
