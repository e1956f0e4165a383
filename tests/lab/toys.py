"""Trainings that take milliseconds and write down that they were computed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prism.lab.grid import Training


@dataclass(frozen=True)
class Toy:
    """An entry whose best learning rate is 2, and whose score at seed s is rate + s."""

    log: str
    name: str = "toy"
    values: tuple[float, ...] = (1.0, 2.0)
    seeds: tuple[int, ...] = (0, 1)
    seconds: float = 0.0
    fails: float | None = None
    """The learning rate at which trainings fail while `log` + ".broken" exists."""
    diverges: tuple[int, ...] = ()
    """The seeds whose scores are NaN."""

    @property
    def rates(self) -> Any:
        return SimpleNamespace(values=self.values)

    def search(self) -> list[Training]:
        return [self._training("search", rate, 100) for rate in self.values] if len(self.values) > 1 else []

    def final(self, rate: float) -> list[Training]:
        return [self._training("final", rate, seed) for seed in self.seeds]

    def _training(self, phase: str, rate: float, seed: int) -> Training:
        settings = {"log": self.log, "name": self.name, "rate": rate, "seed": seed, "seconds": self.seconds}
        about = {"phase": phase, "learning_rate": rate, "seed": seed, "task": "toy", "rule": self.name}
        name = f"{self.name} {phase} {rate} {seed}"
        more = {"fails": self.fails, "diverges": list(self.diverges)}
        return Training("tests.lab.toys:compute", {**settings, **more}, about, name, 1)


def compute(settings: Mapping[str, Any], report: Callable[[int, float], None]) -> dict[str, Any]:
    """Write a line `round name rate seed`, wait, and return a score."""
    words = [os.environ.get("ROUND", "0"), settings["name"], str(settings["rate"]), str(settings["seed"])]
    with Path(settings["log"]).open("a") as file:
        file.write(" ".join(words) + "\n")
    report(1, 0.5)
    waits = Path(settings["log"] + ".waits")  # without such a file a training of many seconds takes none
    time.sleep(settings["seconds"] if settings["seconds"] < 10 or waits.exists() else 0.0)
    if settings["rate"] == settings["fails"] and Path(settings["log"] + ".broken").exists():
        raise ValueError("this rate fails")
    if settings["rate"] < 0:
        os._exit(7)
    score = math.nan if settings["seed"] in settings["diverges"] else settings["rate"] + settings["seed"]
    curve = [
        {"step": 1, "tokens": 10, "seconds": 0.1, "loss": 2.0},
        {"step": 2, "tokens": 20, "seconds": 0.2, "loss": 1.0},
    ]
    return {
        "validation": score,
        "better": "higher",
        "metric": "points",
        "scores": {"": score},
        "curve": curve,
        "seconds": 0.2,
    }
