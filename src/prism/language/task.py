"""The task of `prism train lm`: predict the next token of a text, and validate on held-out text."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.sequence_parallel import Context
from prism.language.adapt_settings import AdaptSettings
from prism.language.corpus import Corpus, prepare
from prism.language.export import write_model
from prism.language.generate import LanguageModel, Sampling, Session
from prism.language.model import Builder, build_model, started_from, vocabulary
from prism.language.perplexity import Score
from prism.language.settings import Settings
from prism.language.tokenizer import load_tokenizer
from prism.language.tokens import Batch, Sequences
from prism.messages import say
from prism.models import PrismForCausalLM
from prism.nn.mixer import Mixer
from prism.overrides import to_plain
from prism.train.callbacks import Report
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.export import resolve_model_folder
from prism.train.model import check_stack, initialize, read_weights
from prism.train.run import check_folder
from prism.train.task import ValidationResult
from prism.train.train import RunResult, train


def loss_sum(model: nn.Module, batch: Batch, z_loss: float = 0.0) -> Tensor:
    """Cross-entropy in nats, summed over all targets of the batch that are predicted, in float32.

    In training it includes the balance loss of mixtures of memories.

    Args:
        z_loss: factor of the squared log-sum-exp of the logits, which is added.
    """
    part = {} if batch.context is None else {"context": batch.context}
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if isinstance(inner, PrismForCausalLM):  # it has the loss without the logits
        given: dict[str, Any] = {"shift_labels": batch.targets, "skip_logits": True, **part}
        given |= {"z_loss": z_loss} if z_loss else {}
        mean: Tensor = model(batch.inputs, reset=batch.reset, use_cache=False, **given).loss
        return mean * batch.predicted
    out = model(input_ids=batch.inputs, reset=batch.reset, use_cache=False, **part)
    logits = out.logits.float().flatten(0, 1)
    nats = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
    balance = getattr(out, "balance_loss", None)
    if model.training and balance is not None:
        nats = nats + batch.predicted * balance
    return nats + z_loss * logits.logsumexp(-1).square().sum() if z_loss else nats


class Samples(Protocol):
    """Numbered samples, such as `Sequences`."""

    context: int
    """Tokens per sample, at most."""

    def __len__(self) -> int: ...
    def batch(self, numbers: np.ndarray) -> Batch: ...


class Validation:
    """Samples spread evenly over the held-out data; the processes share them."""

    def __init__(self, sequences: Samples, bytes_per_token: float, limit: int) -> None:
        """
        Args:
            bytes_per_token: of what is predicted.
            limit: number of samples; 0: all.
        """
        self.sequences, self.bytes_per_token = sequences, bytes_per_token
        count = min(limit or len(sequences), len(sequences))
        self.chosen = np.arange(count) * len(sequences) // count

    @classmethod
    def of(cls, corpus: Corpus, context: int, end: int | None, limit: int) -> Validation:
        """On the held-out text of a corpus."""
        stream = corpus.stream("validation")
        sequences = Sequences(stream, min(context, len(stream) - 1), end)
        return cls(sequences, stream.split.text_bytes / stream.split.tokens, limit)

    @torch.no_grad()
    def score(self, model: nn.Module, world: World, at_once: int) -> Score:
        """Score the model. Every process makes equally many passes, the last one perhaps on a sample that is not counted."""
        mine = self.chosen[world.group :: world.groups]
        rounds = -(-len(self.chosen) // (world.groups * at_once))
        nats, tokens = 0.0, 0
        training = model.training
        model.eval()
        for i in range(rounds):
            numbers = mine[i * at_once : (i + 1) * at_once]
            batch = self.sequences.batch(numbers if len(numbers) else self.chosen[:1])
            batch = (batch if world.context is None else batch.part(world.context)).to(world.device)
            total = loss_sum(model, batch)
            if len(numbers):
                nats, tokens = nats + float(total), tokens + int(batch.predicted)
        model.train(training)
        nats, count = world.sum(nats, tokens)
        return Score(nats / count, self.bytes_per_token)

    def result(self, model: nn.Module, world: World, at_once: int) -> ValidationResult:
        """The score for the loop: what is logged, shown, and decides about early stopping."""
        score = self.score(model, world, at_once)
        record = {
            "validation_nats": score.nats,
            "validation_perplexity": score.perplexity,
            "validation_bits_per_byte": score.bits_per_byte,
        }
        text = f"{score.nats:.4f} nats, perplexity {score.perplexity:.3f}, {score.bits_per_byte:.4f} bits per byte"
        return ValidationResult(score, -score.nats, record, text)


def train_lm(settings: Settings, build: Builder = build_model, report: Report | None = None) -> RunResult:
    """Train a language model, or resume its run. Bad input is refused before anything is written.

    Args:
        report: called with (step, loss) after every step; replaces the progress bar.
    """
    settings.check()
    settings = continued(settings)
    check_folder(settings.out, settings.resume)
    check_stack(settings.model)
    weights = None
    if settings.model.weights is not None:
        with resolve_model_folder(settings.model.weights, write_model) as folder:
            weights = read_weights(folder)
    verify = settings.data.verify and os.environ.get("LOCAL_RANK", "0") == "0"
    corpus = prepare(settings.data.recipe(), settings.data.cache, verify, say)
    return train(LanguageTask(settings, corpus, weights, build), report)


def continued(settings: Settings, given: Collection[str] = ()) -> Settings:
    """`started_from` for a model folder, or for a run folder, which stands for its newest model as in other commands."""
    if settings.init is None:
        return settings
    with resolve_model_folder(settings.init, write_model, say) as folder:
        return started_from(settings, given, folder)


class TextTask:
    """What all tasks on a corpus share: samples, and validation on held-out text. `Task` documents the methods."""

    unit = "tokens"
    settings: Settings | AdaptSettings

    def __init__(self, settings: Settings | AdaptSettings, corpus: Corpus) -> None:
        self.settings, self.corpus = settings, corpus
        end = corpus.manifest.end if settings.data.separate_documents else None
        self.sequences = Sequences(corpus.stream("train"), settings.data.context, end)
        self.validation = Validation.of(corpus, settings.data.context, end, settings.validation.sequences)
        self.context: Context | None = None

    def config(self) -> dict[str, Any]:
        split = self.corpus.manifest.splits["train"]
        seen = {"documents": split.documents, "tokens": split.tokens, "text_bytes": split.text_bytes}
        return {"settings": to_plain(self.settings), "training_data": seen}

    def samples(self, numbers: np.ndarray, device: torch.device) -> Batch:
        batch = self.sequences.samples(numbers, self.settings.seed)
        return batch if self.context is None else batch.part(self.context)

    def weight(self, numbers: np.ndarray) -> int:
        return len(numbers) * self.settings.data.context

    def seen(self, step: int) -> dict[str, float]:
        return {"tokens": step * self.settings.batch.sequences * self.settings.data.context}

    def validate(self, model: nn.Module, world: World, at_once: int) -> ValidationResult:
        return self.validation.result(model, world, at_once)


class LanguageTask(TextTask):
    """A language model whose weights are all trained."""

    name = "lm"
    settings: Settings

    def __init__(self, settings: Settings, corpus: Corpus, weights: dict[str, Tensor] | None, builder: Builder) -> None:
        super().__init__(settings, corpus)
        self.weights, self.builder = weights, builder
        self.vocab_size = vocabulary(settings.model, corpus.manifest)

    def build(self) -> nn.Module:
        return self.builder(self.settings.model, self.vocab_size, self.corpus.manifest.end)

    def initialize(self, model: nn.Module) -> None:
        initialize(model, self.settings.seed, self.weights)

    def identity(self) -> dict[str, Any]:
        settings = self.settings
        model = {f"model.{name}": value for name, value in to_plain(settings.model).items()}
        for name in ("weights", "gradient_checkpointing"):  # these may change
            del model[f"model.{name}"]
        return {
            **model,
            "model.vocab_size": self.vocab_size,
            "seed": settings.seed,
            "data.context": settings.data.context,
            "data.separate_documents": settings.data.separate_documents,
            "batch.sequences": settings.batch.sequences,
            "optimizer.name": settings.optimizer.name,
            "tokenizer": self.corpus.manifest.tokenizer_sha256,
            "tokens": self.corpus.manifest.digest,
        }

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self.corpus.tokenizer_file.read_bytes()}

    def share_sequences(self, context: Context) -> None:
        self.context = context
        with torch.device("meta"):
            mixers = [part for part in self.build().modules() if isinstance(part, Mixer)]
        shortest = min(self.sequences.context, self.validation.sequences.context)  # held-out text may be shorter
        for mixer in mixers:
            mixer.check_cut(shortest // context.size)

    def loss(self, model: nn.Module, samples: Batch) -> Tensor:
        return loss_sum(model, samples, self.settings.z_loss)

    @property
    def sample_every(self) -> int:
        return self.settings.sample.every

    def sample(self, model: nn.Module) -> str:
        """The prompt and what the model writes after it, always with the same random numbers, which are its own."""
        wanted = self.settings.sample
        lm = LanguageModel(
            model, load_tokenizer(self.corpus.tokenizer_file, self.corpus.manifest.end_token), "training"
        )
        training = model.training
        model.eval()
        session = Session(lm, self.settings.seed)
        session.read(wanted.prompt)
        pieces = [*session.write(wanted.tokens, Sampling(wanted.temperature)), session.text.flush()]
        model.train(training)
        return wanted.prompt + "".join(pieces)

    def write_model(self, run: Path, checkpoint: Checkpoint, folder: Path) -> None:
        write_model(run, checkpoint, folder, self.builder)
