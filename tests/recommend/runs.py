"""Small training runs of recommenders, in this process or in children that can be killed."""

from __future__ import annotations

import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import Tensor

from prism.overrides import override
from prism.recommend.learner import Learner
from prism.recommend.settings import RecSettings
from prism.recommend.task import train_rec
from prism.train.run import read_log
from tests.children import start_children


def small(root: Path, **changes: Any) -> RecSettings:
    """Settings of a run that takes a second; `changes` are nested as in a TOML file."""
    base = {
        "out": str(root / "run"),
        "steps": 24,
        "device": "cpu",
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 1, "dropout": 0.1},
        "data": {"cache": str(root / "cache"), "length": 12, "synthetic": {"users": 60, "items": 120, "events": 1500}},
        "batch": {"sequences": 8},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 4},
        "validation": {"every": 8, "patience": 0},
        "checkpoint": {"every": 6},
        "log": {"every": 1},
    }
    return override(override(RecSettings(), base, "base"), changes, "changes")


def records_of(run: Path) -> list[dict[str, Any]]:
    """The records of log.jsonl without what depends on the clock."""
    records = read_log(run / "log.jsonl")
    return [{name: value for name, value in record.items() if name != "events_per_second"} for record in records]


def start(settings: RecSettings, processes: int = 1, slow: bool = False) -> list[BaseProcess]:
    """Train in children; `slow` gives time to meet them between steps."""
    return start_children(_train, settings, slow, processes=processes)


def _train(settings: RecSettings, slow: bool) -> None:
    if slow:
        forward = Learner.forward

        def slow_forward(self: Learner, *arguments: Any) -> Tensor:
            time.sleep(0.01)
            return forward(self, *arguments)

        Learner.forward = slow_forward
    train_rec(settings)
