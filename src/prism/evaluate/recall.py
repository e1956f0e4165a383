"""Associative recall as a probe: train a small model of one rule on fresh sequences, then count right answers.

Design choices
- Layers of norm → short convolution (4, the same for every rule) → mixer, no MLP: what is measured is the memory. One layer
  is enough with the convolution, and finds the solution in hundreds of steps where two need thousands.
- State size is set, not inherited: every rule gets the same key and value width a head, so accuracy can be read against it.
- Data are drawn afresh at every step from a generator of the run's own seed; test sequences from another one, never seen.
- Logits are computed only where something is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism import rules
from prism.data.mqar import IGNORE, Recall
from prism.nn import Mixer
from prism.rules.parts import ShortConv
from prism.rules.rule import Span, check_options

_TEST_SEED = 1 << 40


@dataclass(frozen=True)
class RecallRun:
    """One model to train: a rule, its sizes and its budget."""

    rule: str
    task: Recall = field(default_factory=Recall)
    options: dict[str, Any] = field(default_factory=dict)
    """The rule's own options (`steps`, `preset`, …)."""
    label: str = ""
    layers: int = 1
    width: int = 64
    heads: int = 1
    key_dim: int = 8
    value_dim: int | None = None
    """A head's value width; `width / heads` unless given."""
    steps: int = 900
    batch: int = 32
    learning_rate: float = 1e-2
    seed: int = 0
    test_sequences: int = 1024
    test_pairs: tuple[int, ...] = ()
    """Numbers of pairs to test with; the task's own unless given."""

    @property
    def name(self) -> str:
        return self.label or self.rule


class RecallModel(nn.Module):
    """Tokens `[B, N]` → logits at the places asked for."""

    def __init__(self, run: RecallRun) -> None:
        super().__init__()
        width = run.width
        value_dim = width // run.heads if run.value_dim is None else run.value_dim
        # The convolution stands before every mixer alike, so rules that have one of their own go without. Rules whose state
        # is not K × V have sizes of their own, which the results state.
        sizes = {"key_dim": run.key_dim, "value_dim": value_dim, "conv_size": 1}
        check_options(
            rules.get(run.rule), run.options
        )  # one that is also an argument of Mixer's would not be told as one
        taken = rules.get(run.rule).option_names()
        options = {name: value for name, value in sizes.items() if name in taken} | run.options
        self.embedding = nn.Embedding(run.task.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # a louder one drowns what the mixers add
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(run.layers))
        self.convolutions = nn.ModuleList(ShortConv(width) for _ in range(run.layers))
        self.mixers = nn.ModuleList(Mixer(run.rule, width, run.heads, **options) for _ in range(run.layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, run.task.vocabulary, bias=False)

    @property
    def state_size(self) -> int:
        """Numbers in all memories of one sequence."""
        return sum(mixer.state_size for mixer in self.mixers)  # type: ignore[misc]  # a ModuleList forgets what it holds

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, convolution, mixer in zip(self.norms, self.convolutions, self.mixers, strict=True):
            x = x + mixer(convolution(norm(x), None, Span())[0])[0]
        return self.head(self.norm(x[asked]))


def train_recall(run: RecallRun, report: Callable[[int, float], None] = lambda step, loss: None) -> dict[str, Any]:
    """Train and test one model; `report(step, loss)` is called as it goes. Returns what was run and how well it recalls."""
    torch.manual_seed(run.seed)
    model = RecallModel(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, run.steps))
    data = torch.Generator().manual_seed(run.seed)
    for step in range(run.steps):
        tokens, answers = run.task.sample(run.batch, data)
        asked = answers != IGNORE
        loss = F.cross_entropy(model(tokens, asked), answers[asked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 9 or step == run.steps - 1:
            report(step + 1, loss.item())
    pairs = run.test_pairs or (run.task.pairs,)
    accuracy = {n: count_right(model, _with_pairs(run.task, n), run.test_sequences, run.seed) for n in pairs}
    return {
        **asdict(run),
        "name": run.name,
        "accuracy": accuracy[run.task.pairs] if run.task.pairs in accuracy else max(accuracy.values()),
        "accuracy_by_pairs": accuracy,
        "state_size": model.state_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "final_loss": loss.item(),
    }


@torch.no_grad()
def count_right(model: nn.Module, task: Recall, sequences: int, seed: int, batch: int = 256) -> float:
    """The share of questions answered right (every sequence asks equally many)."""
    generator = torch.Generator().manual_seed(_TEST_SEED + seed)
    right = total = 0
    for start in range(0, sequences, batch):
        tokens, answers = task.sample(min(batch, sequences - start), generator)
        asked = answers != IGNORE
        right += int((model(tokens, asked).argmax(-1) == answers[asked]).sum())
        total += int(asked.sum())
    return right / total


def _with_pairs(task: Recall, pairs: int) -> Recall:
    return Recall(pairs, max(task.length, 4 * pairs), task.vocabulary, task.filler, task.power)


def _schedule(step: int, steps: int, warmup: float = 0.05, floor: float = 0.05) -> float:
    rise = max(1, int(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
