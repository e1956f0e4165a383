"""The task of `prism train dpo`: prefer the better of two answers (direct preference optimization, Rafailov et al., 2023).

    loss = -log σ(β · [log π(chosen) - log r(chosen) - log π(rejected) + log r(rejected)])

π is the model and r the reference, which is the model before the first step. log π(…) is the sum over the tokens of an answer,
given the prompt. The loss starts at log 2 and is a mean over pairs.

The reference does not change, so its log-probabilities are computed once, for all pairs, and cached: training holds one model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from safetensors.torch import load_file, save
from torch import Tensor, nn

from prism.device import pick_device
from prism.files import default_cache, write_atomically
from prism.language.adapted import Base
from prism.language.chat import ChatFormat
from prism.language.chat_rows import ChatCorpus, ChatRows
from prism.language.tokens import Batch
from prism.language.tune import TunedTask, opened, prepared
from prism.language.tune_settings import DpoSettings
from prism.messages import progress_bars
from prism.models.cross_entropy import IGNORED
from prism.train.callbacks import Report
from prism.train.distributed import World
from prism.train.order import sequence_of
from prism.train.step import autocast
from prism.train.task import ValidationResult
from prism.train.train import RunResult, train


def train_dpo(settings: DpoSettings, report: Report | None = None) -> RunResult:
    """Train a model on preferences, or resume such a run. Bad input is refused before anything is written.

    Args:
        report: called with (step, loss) after every step; replaces the progress bar.
    """
    with opened(settings) as (settings, base, chat):
        if settings.graph:
            raise ValueError("graph needs rows of equal length, and pairs of answers have none: omit --graph")
        corpus = prepared(settings, chat, packing=False, pairs=True)
        task = DpoTask(settings, base, chat, corpus, reference_of(settings, base, corpus))
    return train(task, report)


@dataclass(frozen=True)
class Pairs:
    """Pairs of answers: `Batch` of `[2 B, T]`, chosen and rejected in turn, and the reference's log-probabilities `[B, 2]`."""

    batch: Batch
    reference: Tensor

    def __getitem__(self, rows: slice) -> Pairs:
        start, stop, _ = rows.indices(len(self.reference))
        return Pairs(self.batch[2 * start : 2 * stop], self.reference[rows])

    def to(self, device: torch.device) -> Pairs:
        return Pairs(self.batch.to(device), self.reference.to(device, non_blocking=True))

    def tensors(self) -> dict[str, Tensor]:
        return {**self.batch.tensors(), "reference": self.reference}


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probability of each row's answers: float32 `[rows]`."""
    logits = model(input_ids=batch.inputs, reset=None, use_cache=False).logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -nats.view(batch.targets.shape).sum(1)


def margins(model: nn.Module, pairs: Pairs) -> Tensor:
    """By how much more than the reference the model prefers the chosen answers, in nats: `[B]`."""
    chosen, rejected = (log_probabilities(model, pairs.batch).view(-1, 2) - pairs.reference).unbind(1)
    return chosen - rejected


def dpo_loss(margin: Tensor, beta: float) -> Tensor:
    """The loss of each pair."""
    return -F.logsigmoid(beta * margin)


def reference_of(settings: DpoSettings, base: Base, corpus: ChatCorpus) -> dict[str, Tensor]:
    """The reference's log-probabilities of all pairs, float32 `[pairs, 2]` by split, from the cache or computed now."""
    device = pick_device(settings.device)
    manifest = corpus.corpus.manifest
    key = [base.digest, manifest.digest, settings.precision, device.type]
    name = hashlib.sha256(" ".join(key).encode()).hexdigest()[:20]
    folder = (settings.data.cache or default_cache()) / "references"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            model = base.lm.model.to(device)
            found = {split: _scored(model, corpus, split, settings, device) for split in manifest.splits}
            write_atomically(path, save(found))
            if not settings.lora.rank:
                model.to("cpu")
    return load_file(path)


@torch.no_grad()
def _scored(model: nn.Module, corpus: ChatCorpus, split: str, settings: DpoSettings, device: torch.device) -> Tensor:
    rows = ChatRows(corpus.stream(split), settings.data.context, packing=False)
    at_once = 2 * (settings.batch.micro or settings.batch.sequences)
    found = []
    with progress_bars() as bars, autocast(settings, device)():
        bar = bars.add_task(f"reference on {split} pairs", total=len(rows))
        for start in range(0, len(rows), at_once):
            numbers = np.arange(start, min(start + at_once, len(rows)))
            found.append(log_probabilities(model, rows.batch(numbers).to(device)).cpu())
            bars.advance(bar, len(numbers))
    return torch.cat(found).view(-1, 2)


@dataclass(frozen=True)
class PreferenceScore:
    """Means over held-out pairs."""

    loss: float
    accuracy: float
    """Fraction of pairs whose chosen answer became more likely against the rejected one than it is for the reference."""
    margin: float
    """In nats."""


class DpoTask(TunedTask):
    """A model, or an adapter, that learns to prefer answers."""

    unit = "pairs"
    settings: DpoSettings

    def __init__(
        self, given: DpoSettings, base: Base, chat: ChatFormat, corpus: ChatCorpus, reference: dict[str, Tensor]
    ) -> None:
        self.reference = reference
        self.rows = {
            split: ChatRows(corpus.stream(split), given.data.context, packing=False)
            for split in ("train", "validation")
        }
        self.count = len(reference["train"])
        super().__init__(given, base, chat, corpus, self.count)
        held = len(reference["validation"])
        chosen = min(given.validation.sequences or held, held)
        self.validated = np.arange(chosen) * held // chosen

    def pairs(self, split: str, numbers: np.ndarray) -> Pairs:
        rows = np.stack([2 * numbers, 2 * numbers + 1], axis=1).reshape(-1)
        return Pairs(self.rows[split].batch(rows), self.reference[split][torch.from_numpy(numbers)])

    def samples(self, numbers: np.ndarray, device: torch.device) -> Pairs:
        return self.pairs("train", sequence_of(numbers, self.count, self.settings.seed))

    def weight(self, numbers: np.ndarray) -> int:
        return len(numbers)

    def seen(self, step: int) -> dict[str, float]:
        return {"epochs": step * self.settings.batch.sequences / self.count}

    def loss(self, model: nn.Module, samples: Pairs) -> Tensor:
        return dpo_loss(margins(model, samples), self.settings.beta).sum()

    @torch.no_grad()
    def validate(self, model: nn.Module, world: World, at_once: int) -> ValidationResult:
        mine = self.validated[world.group :: world.groups]
        sums = torch.zeros(4, dtype=torch.float64)
        training = model.training
        model.eval()
        for i in range(-(-len(self.validated) // (world.groups * at_once))):  # equally many passes in every process
            numbers = mine[i * at_once : (i + 1) * at_once]
            pairs = self.pairs("validation", numbers if len(numbers) else self.validated[:1]).to(world.device)
            margin = margins(model, pairs).double().cpu()
            if len(numbers):
                losses, won = dpo_loss(margin, self.settings.beta), (margin > 0).double()
                sums += torch.stack([losses.sum(), won.sum(), margin.sum(), torch.tensor(float(len(numbers)))])
        model.train(training)
        *totals, count = world.sum(*sums.tolist())
        score = PreferenceScore(*(total / count for total in totals))
        record = {f"validation_{name}": value for name, value in vars(score).items()}
        text = f"loss {score.loss:.4f}, {100 * score.accuracy:.1f} % preferred, margin {score.margin:.3f} nats"
        return ValidationResult(score, -score.loss, record, text)
