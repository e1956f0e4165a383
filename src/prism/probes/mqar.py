"""The recall probe: multi-query associative recall (Arora et al., Zoology 2023), and a small model trained on it.

A sequence shows n key-value pairs, then asks for each key once, in random order and at random gaps:

    k₁ v₁ k₂ v₂ … kₙ vₙ  0 0 k₂ 0 k₁ 0 0 0 kₙ …          at each asked key the answer is its value

Keys and values come from disjoint halves of the vocabulary, each without replacement. Gaps follow the published power law
(near questions are likelier). Unused places hold 0; or with `filler="noise"` tokens that are *not* live in this sequence;
or with `filler="random"` any token, as published. Then a live key may come again, followed by anything. The pair that came
first is still the true one, so the ceiling stays 1, but a memory in which the latest pair wins errs: with 256 tokens often,
with 8192 hardly ever.

Design choices of the model and its training
- Layers of norm → short convolution (4, the same for every rule) → mixer, no MLP: the memory is what is measured. With
  the convolution one layer is enough, and finds the solution in hundreds of steps where two layers need thousands.
- The state size is set: every rule gets the same key and value width per head, so accuracy can be compared by state size.
- Data are drawn at every step from a generator with the run's seed; test sequences from another one, never seen before.
- Logits are computed only where something is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism import rules
from prism.nn import Mixer
from prism.probes.draws import distinct, others
from prism.probes.task import IGNORE, Batch, Task
from prism.rules.parts import ShortConv
from prism.rules.rule import Span, check_options

FILLERS = ("zeros", "noise", "random")
_TEST_SEED = 1 << 40


@dataclass(frozen=True)
class Recall(Task):
    """One setting of the task. The baseline answers with any value that the sequence shows: 1 / pairs."""

    name: ClassVar[str] = "mqar"

    pairs: int = 16
    """Key-value pairs in a sequence."""
    length: int = 64
    """Tokens in a sequence; at least 4 · pairs."""
    vocabulary: int = 128
    """Size of the vocabulary; keys are 1 … V/2 - 1, values V/2 … V - 1."""
    filler: str = "zeros"
    """`zeros`, `noise` (tokens that are not live in the sequence) or `random` (any token)."""
    power: float = 0.01
    """Gaps g are drawn with probability ∝ (g + 1)^(power - 1)."""
    test_pairs: tuple[int, ...] = ()
    """More numbers of pairs to test with; the sequences get longer where they must."""

    def __post_init__(self) -> None:
        half = self.vocabulary // 2
        if self.pairs < 1:
            raise ValueError(f"pairs must be ≥ 1, got {self.pairs}")
        if self.length < 4 * self.pairs or self.length % 2:
            raise ValueError(f"length must be even and ≥ 4 · pairs = {4 * self.pairs}, got {self.length}")
        if half - 1 < self.pairs:
            raise ValueError(f"vocabulary must be ≥ {2 * self.pairs + 2} for {self.pairs} pairs, got {self.vocabulary}")
        if self.filler not in FILLERS:
            raise ValueError(f"filler must be one of {', '.join(FILLERS)}, got {self.filler!r}")
        for pairs in self.test_pairs:
            _with_pairs(self, pairs)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw tokens `[B, N]` and answers `[B, N]` (IGNORE where nothing is asked)."""
        n, half, device = self.pairs, self.vocabulary // 2, generator.device
        keys = distinct(count, n, half - 1, generator) + 1
        values = distinct(count, n, self.vocabulary - half, generator) + half
        if self.filler == "zeros":
            tokens = torch.zeros(count, self.length, dtype=torch.long, device=device)
        elif self.filler == "noise":
            live = torch.cat([torch.zeros_like(keys[:, :1]), keys, values], 1)
            tokens = others(live, self.length, self.vocabulary, generator)
        else:
            tokens = torch.randint(self.vocabulary, (count, self.length), generator=generator, device=device)
        tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
        slots = (self.length - 2 * n) // 2
        chance = (torch.arange(slots, device=device) + 1.0).pow(self.power - 1).expand(count, slots)
        asked = 2 * n + 2 * torch.multinomial(chance, n, replacement=False, generator=generator)
        order = torch.rand(count, n, generator=generator, device=device).argsort(1)
        tokens.scatter_(1, asked, keys.gather(1, order))
        answers = torch.full_like(tokens, IGNORE).scatter_(1, asked, values.gather(1, order))
        return Batch(tokens, answers)

    def tests(self) -> dict[str, Task]:
        pairs = dict.fromkeys((self.pairs, *self.test_pairs))
        return {f"pairs={n}": _with_pairs(self, n) for n in pairs}

    def baseline(self) -> float:
        return 1 / self.pairs


@dataclass(frozen=True)
class RecallRun:
    """One model to train: a rule, its sizes and its budget."""

    rule: str
    task: Recall = field(default_factory=Recall)
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the rule (`steps`, `preset`, …)."""
    label: str = ""
    layers: int = 1
    width: int = 64
    heads: int = 1
    key_dim: int = 8
    value_dim: int | None = None
    """Value width of a head. None: `width / heads`."""
    steps: int = 900
    batch: int = 32
    learning_rate: float = 1e-2
    seed: int = 0
    test_sequences: int = 1024
    test_pairs: tuple[int, ...] = ()
    """Numbers of pairs to test with. Empty: those of the task."""

    @property
    def name(self) -> str:
        return self.label or self.rule


class RecallModel(nn.Module):
    """Tokens `[B, N]` → logits at the positions that are asked."""

    def __init__(self, run: RecallRun) -> None:
        super().__init__()
        width = run.width
        value_dim = width // run.heads if run.value_dim is None else run.value_dim
        # Every mixer has the same convolution in front, so rules with a built-in one go without it (conv_size 1). Rules
        # whose state is not K × V have other sizes, which the results give.
        sizes = {"key_dim": run.key_dim, "value_dim": value_dim, "conv_size": 1}
        check_options(rules.get(run.rule), run.options)  # Mixer would take an option such as `width` as its argument
        taken = rules.get(run.rule).option_names()
        options = {name: value for name, value in sizes.items() if name in taken} | run.options
        self.embedding = nn.Embedding(run.task.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # a larger one drowns the output of the mixers
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(run.layers))
        self.convolutions = nn.ModuleList(ShortConv(width) for _ in range(run.layers))
        self.mixers = nn.ModuleList(Mixer(run.rule, width, run.heads, **options) for _ in range(run.layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, run.task.vocabulary, bias=False)

    @property
    def state_size(self) -> int:
        """Number of values in all memories of one sequence."""
        return sum(mixer.state_size for mixer in self.mixers)  # type: ignore[misc]  # a ModuleList forgets what it holds

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, convolution, mixer in zip(self.norms, self.convolutions, self.mixers, strict=True):
            x = x + mixer(convolution(norm(x), None, Span())[0])[0]
        return self.head(self.norm(x[asked]))


def train_recall(run: RecallRun, report: Callable[[int, float], None] = lambda step, loss: None) -> dict[str, Any]:
    """Train and test one model; calls `report(step, loss)` every 10 steps. Returns the run and its accuracy."""
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
    """The fraction of right answers (every sequence asks equally many questions)."""
    generator = torch.Generator().manual_seed(_TEST_SEED + seed)
    right = total = 0
    for start in range(0, sequences, batch):
        tokens, answers = task.sample(min(batch, sequences - start), generator)
        asked = answers != IGNORE
        right += int((model(tokens, asked).argmax(-1) == answers[asked]).sum())
        total += int(asked.sum())
    return right / total


def _with_pairs(task: Recall, pairs: int) -> Recall:
    return replace(task, pairs=pairs, length=max(task.length, 4 * pairs), test_pairs=())


def _schedule(step: int, steps: int, warmup: float = 0.05, floor: float = 0.05) -> float:
    rise = max(1, int(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


PRESETS = {
    "easy": Recall(8, 32, test_pairs=(2, 4, 6)),
    "starved": Recall(16, 64, test_pairs=(4, 8, 12)),
    "zoology-64": Recall(4, 64, 8192),
    "zoology-128": Recall(8, 128, 8192),
    "zoology-256": Recall(16, 256, 8192),
    "zoology-512": Recall(64, 512, 8192),
}
"""Small settings that train in a minute on one core, and those of Zoology's figure 2."""
