"""`prism train sft` and `prism train dpo`: fine-tune a saved model, with settings from a TOML file and flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from prism.cli.flags import parse_settings
from prism.language.dpo import train_dpo
from prism.language.sft import train_sft
from prism.language.tune_settings import BLANK, no_presets
from prism.messages import INTERRUPTED
from prism.train.train import RunResult


def sft(arguments: Sequence[str]) -> int:
    """Train on chats until the last step or a signal; returns the exit code."""
    result = train_sft(parse(arguments, "sft"))
    score = "" if result.score is None else f" at {result.score.nats:.4f} nats per token of the answers"
    return _finished(result, score)


def dpo(arguments: Sequence[str]) -> int:
    """Train on pairs of answers until the last step or a signal; returns the exit code."""
    result = train_dpo(parse(arguments, "dpo"))
    score = "" if result.score is None else f"; the better answer is preferred in {100 * result.score.accuracy:.1f} %"
    return _finished(result, score)


def _finished(result: RunResult, score: str) -> int:
    if result.model is not None:
        what = "adapter" if (result.model / "adapter_config.json").is_file() else "model"
        print(f"trained {result.step} steps{score}; the {what} is in {result.model}")
    return INTERRUPTED if result.stopped else 0


def parse(arguments: Sequence[str], task: str) -> Any:
    """Settings from the words after `prism train sft` or `dpo`, of which the first may be the model's folder."""
    words = list(arguments)
    if words and not words[0].startswith("-"):
        words.insert(0, "--init")
    return parse_settings(words, task, BLANK[task], partial(no_presets, task), " [MODEL]")
