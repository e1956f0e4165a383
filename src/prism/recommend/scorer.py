"""Scorer: what evaluation ranks with. Models and baselines are scorers, so that all are ranked by the same code."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.recommend.events.histories import Histories, contexts
from prism.recommend.events.split import Targets
from prism.recommend.model import PrismForRecommendation
from prism.rules.parts import at_least_float32


class Scorer(Protocol):
    """Scores all items as the next one of a user."""

    @property
    def num_items(self) -> int: ...

    def scores(self, targets: Targets, histories: Histories, max_length: int) -> Tensor:
        """Scores `[B, N + 1]` after the events before each target, of which a model reads the last `max_length`.

        A new tensor, which the caller may change; column 0 is no item.
        """
        ...


class ModelScorer:
    """A model as a scorer; its item vectors are computed once."""

    def __init__(self, model: PrismForRecommendation) -> None:
        self.model = model
        self.vectors = at_least_float32(model.item_vectors())

    @property
    def num_items(self) -> int:
        return self.model.config.num_items

    def scores(self, targets: Targets, histories: Histories, max_length: int) -> Tensor:
        events = contexts(histories, targets.users, targets.ends, max_length)
        device = self.vectors.device
        gaps = None
        if self.model.config.time_gaps:
            if events.gaps is None:
                raise ValueError("the model was trained with time gaps: the events need times")
            gaps = torch.from_numpy(events.gaps).to(device)
        lengths = torch.from_numpy(events.mask.sum(1)).to(device)
        profiles = None if events.profiles is None else torch.from_numpy(events.profiles).to(device)
        hidden = self.model.last_hidden(torch.from_numpy(events.items).to(device), lengths, gaps, profiles)
        return F.linear(hidden.to(self.vectors.dtype), self.vectors)
