"""Every rule trains: at most 200 steps on a tiny recall task bring the loss below that of a model without memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism import Mixer, rules
from prism.lab.tasks.mqar import IGNORE, Recall
from prism.rules.parts import ShortConv
from prism.rules.rule import Span

TASK = Recall(pairs=2, length=12, vocabulary=16)
WITHOUT_MEMORY = math.log(TASK.vocabulary - TASK.vocabulary // 2)
"""The least loss of a model that knows which tokens are values but not which it has seen."""
WIDTH, HEADS, STEPS, BATCH = 16, 2, 200, 16
SMALL: dict[str, dict[str, Any]] = {
    "based": {"key_dim": 4},
    "mamba2": {"key_dim": 16},
    "mamba3": {"key_dim": 16},
    "s4d": {"key_dim": 16},
}
"""Defaults that do not shrink with the width."""


class Tiny(nn.Module):
    """One layer. The convolution lets rules that have none of their own bind a value to the key before it."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TASK.vocabulary, WIDTH)
        self.conv = ShortConv(WIDTH, 2)
        self.mixer = Mixer(rule, WIDTH, HEADS, **SMALL.get(rule, {}))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TASK.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.mixer(self.conv(x, None, Span())[0])[0]))


LONG = {"atlas", "mesa", "mom", "slstm", "titans", "ttt_mlp"}
"""Rules whose two hundred steps take several seconds; `make test-slow` trains them."""


@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in rules.names()]
)
def test_two_hundred_steps_teach_it_to_remember(rule: str) -> None:
    """It stops as soon as twenty steps in a row have been good enough on average."""
    model = Tiny(rule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    data = torch.Generator().manual_seed(0)
    losses: list[float] = []
    while len(losses) < STEPS and (len(losses) < 20 or sum(losses[-20:]) / 20 >= 0.8 * WITHOUT_MEMORY):
        tokens, answers = TASK.sample(BATCH, data)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    start, end = losses[0], sum(losses[-20:]) / 20
    assert end < 0.8 * WITHOUT_MEMORY < start, f"loss went from {start:.2f} to {end:.2f}"
