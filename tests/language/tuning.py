"""Small runs of `prism train sft` and `prism train dpo` for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prism.language.tune_settings import DpoSettings, SftSettings
from prism.overrides import override
from tests.tiny_lm import save_lm


class Killed(BaseException):
    """Ends a run as a kill does: nothing is written any more. (Real kills: tests/train/test_kill.py.)"""


def at(step: int) -> Any:
    """A report that kills the run after a step."""

    def report(now: int, loss: float) -> None:
        if now == step:
            raise Killed

    return report


def quiet(step: int, loss: float) -> None:
    """A report that says nothing."""


def write_chats(path: Path) -> Path:
    """Sums of two digits, some in chats of two questions."""
    rows = []
    for i in range(60):
        a, b = i % 7, i % 5
        messages = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}]
        if i % 3 == 0:
            messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{a + b}!"}]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows))
    return path


def write_pairs(path: Path) -> Path:
    rows = [
        {"prompt": f"{i % 7}+{i % 5}", "chosen": f"{i % 7 + i % 5}", "rejected": "none" * (i % 2 + 1)}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def small_sft(root: Path, **changes: Any) -> SftSettings:
    """Settings of a run that takes a second; `changes` are nested as in a TOML file."""
    if not (root / "chats.jsonl").exists():
        write_chats(root / "chats.jsonl")
    return override(override(SftSettings(), _common(root, "chats.jsonl", 48), "base"), changes, "changes")


def small_dpo(root: Path, **changes: Any) -> DpoSettings:
    if not (root / "pairs.jsonl").exists():
        write_pairs(root / "pairs.jsonl")
    return override(override(DpoSettings(), _common(root, "pairs.jsonl", 48), "base"), changes, "changes")


def _common(root: Path, data: str, context: int) -> dict[str, Any]:
    if not (root / "base").exists():
        save_lm(root / "base", "gated_delta*2")
    return {
        "init": str(root / "base"),
        "out": str(root / "run"),
        "steps": 12,
        "device": "cpu",
        "data": {"sources": [str(root / data)], "cache": str(root / "cache"), "context": context, "validation": 0.1},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 2},
        "validation": {"every": 6, "sequences": 4},
        "checkpoint": {"every": 5},
        "log": {"every": 1},
    }
