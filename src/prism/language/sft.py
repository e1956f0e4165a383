"""The task of `prism train sft`: predict the answers in chats, and validate on held-out chats.

The loss is the cross-entropy of the answers' tokens, their ends of turn included. All other tokens are read and not predicted.
Every predicted token counts the same, whatever chat or row it is in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prism.language.adapted import Base
from prism.language.chat import ChatFormat
from prism.language.chat_rows import ChatCorpus, ChatRows
from prism.language.task import Validation, loss_sum
from prism.language.tokens import Batch
from prism.language.tune import TunedTask, opened, prepared
from prism.language.tune_settings import SftSettings
from prism.messages import say
from prism.train.callbacks import Report
from prism.train.distributed import World
from prism.train.order import sequence_of
from prism.train.task import ValidationResult
from prism.train.train import RunResult, train


def train_sft(settings: SftSettings, report: Report | None = None) -> RunResult:
    """Fine-tune a model on chats, or resume such a run. Bad input is refused before anything is written.

    Args:
        report: called with (step, loss) after every step; replaces the progress bar.
    """
    with opened(settings) as (settings, base, chat):
        if settings.data.packing and not base.lm.own:
            say(f"the memories of {type(base.lm.model).__name__} are not reset where a chat starts: one chat per row")
            settings = replace(settings, data=replace(settings.data, packing=False))
        if settings.graph and not settings.data.packing:
            raise ValueError("graph needs rows of equal length: omit --graph, or --no-data.packing")
        task = SftTask(settings, base, chat, prepared(settings, chat, settings.data.packing, pairs=False))
    return train(task, report)


class SftTask(TunedTask):
    """A model, or an adapter, that learns answers."""

    settings: SftSettings

    def __init__(self, given: SftSettings, base: Base, chat: ChatFormat, corpus: ChatCorpus) -> None:
        self.rows, held = (
            ChatRows(corpus.stream(split), given.data.context, given.data.packing) for split in ("train", "validation")
        )
        super().__init__(given, base, chat, corpus, len(self.rows))
        self.validation = Validation(held, corpus.bytes_per_token, given.validation.sequences)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "data.packing": self.settings.data.packing}

    def _rows_of(self, numbers: np.ndarray) -> np.ndarray:
        return sequence_of(numbers, len(self.rows), self.settings.seed)

    def samples(self, numbers: np.ndarray, device: torch.device) -> Batch:
        return self.rows.batch(self._rows_of(numbers))

    def weight(self, numbers: np.ndarray) -> int:
        return self.rows.predicted(self._rows_of(numbers))

    def seen(self, step: int) -> dict[str, float]:
        return {"epochs": step * self.settings.batch.sequences / len(self.rows)}

    def loss(self, model: nn.Module, samples: Batch) -> Tensor:
        return loss_sum(model, samples)

    def validate(self, model: nn.Module, world: World, at_once: int) -> ValidationResult:
        return self.validation.result(model, world, at_once)
