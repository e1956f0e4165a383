"""One training of a comparison on text: a language model from prepared tokens, with the product's own steps.

`train_text(settings, report)` trains in this process and writes nothing, so that many can run side by side on one GPU. Its
settings are the fields of `TextRun`. A learning rate is chosen by `validation`; with `test` false the test split is not read.
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from prism.device import pick_device, without_subnormals
from prism.language.breakdown import RARE, WANTED, Breakdown, History, head_nats, training_counts
from prism.language.corpus import Corpus, open_corpus
from prism.language.lambada import lambada, read_passages
from prism.language.perplexity import Score
from prism.language.settings import DataSettings, Settings
from prism.language.task import LanguageTask
from prism.language.tokenizer import load_tokenizer
from prism.language.tokens import Sequences
from prism.messages import did_you_mean
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn.mixer import Mixer
from prism.overrides import override
from prism.train.callbacks import Report, Tell
from prism.train.distributed import World
from prism.train.graph import check_graph
from prism.train.loop import Callback, Loop, Settled
from prism.train.settings import BatchSettings, OptimizerSettings, ScheduleSettings, ValidationSettings
from prism.train.step import Stepper

MODEL_KEYS = [name for name in inspect.signature(PrismConfig.__init__).parameters if name not in ("self", "kwargs")]
"""What a model's configuration takes. transformers would keep any other name without using it."""


@dataclass(frozen=True)
class TextRun:
    """Settings of one training."""

    data: str
    """Folder of prepared tokens with the splits train, validation and test."""
    model: dict[str, Any]
    """Arguments of `PrismConfig`: layers, hidden_size, num_hidden_layers, num_heads, rule_options, intermediate_size …"""
    steps: int
    learning_rate: float
    """The peak."""
    seed: int = 0
    """Of the initial weights and the order of samples."""
    context: int = 1024
    batch: int = 32
    """Sequences in a step."""
    micro: int | None = None
    """Sequences computed at once; None: all."""
    weight_decay: float = 0.1
    clip: float | None = 1.0
    warmup: float = 0.05
    """Part of the steps."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Further settings of the optimizer, as under `optimizer` in a settings file of `prism train lm`."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    final: float = 0.1
    """Last learning rate over the peak."""
    separate_documents: bool = True
    """Reset the memories where a document starts."""
    test: bool = True
    """Measure on the split test."""
    evaluations: int = 10
    """Validations, spread evenly over the run; the last one is at its end."""
    validation_tokens: int = 131_072
    """Tokens of the validations during the run; the last one reads the whole split."""
    contexts: tuple[int, ...] = ()
    """Longer contexts at which the test split is measured too, by position."""
    rare: int = RARE
    """Training occurrences up to which a bigram is rare."""
    lambada: str | None = None
    """LAMBADA as a jsonl file; None: not measured."""
    device: str = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    graph: bool = False
    compile: bool = False
    recompute: Literal["auto", "none", "cheap"] = "auto"
    threads: int = 1
    """Threads of torch in this process: trainings side by side must not fight for cores."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], prefix: str = "") -> TextRun:
        """From plain values; a name that does not exist, or a value of another type, is refused.

        Args:
            prefix: the section that the names are in, for messages.
        """
        known = [part.name for part in fields(cls)]
        for name in settings:
            if name not in known:
                raise ValueError(f"a text run has no setting {prefix + name!r}{did_you_mean(name, known)}")
        plain, tables = dict(settings), {}
        for name in ("model", "optimizer"):
            tables[name] = plain.pop(name, {})
            if not isinstance(tables[name], dict):
                raise ValueError(f"{prefix}{name} must be a table, got {tables[name]!r}")
        for name in tables["model"]:
            if name not in MODEL_KEYS:
                raise ValueError(f"a model has no setting {f'{prefix}model.{name}'!r}{did_you_mean(name, MODEL_KEYS)}")
        start = cls(data="", steps=0, learning_rate=math.nan, **tables)  # neither is valid: they must be given
        run = override(start, plain, "a text run", prefix)
        run.check(prefix)
        return run

    def check(self, prefix: str = "") -> None:
        """Refuse values that no training can have; those of the product's steps are checked by `train_settings`."""
        least = {name: getattr(self, name) for name in ("steps", "context", "batch", "threads", "validation_tokens")}
        least |= {"contexts": min(self.contexts, default=1), "micro": 1 if self.micro is None else self.micro}
        for name, number in {**least, "evaluations": self.evaluations}.items():
            if number < 1:
                raise ValueError(f"{prefix}{name} must be at least 1, got {number}")
        if self.rare < 0:
            raise ValueError(f"{prefix}rare must be at least 0, got {self.rare}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"{prefix}warmup must be at least 0 and below 1, got {self.warmup:g}")
        if not self.learning_rate > 0:
            raise ValueError(f"{prefix}learning_rate must be above 0, got {self.learning_rate:g}")
        if self.lambada is not None and not Path(self.lambada).is_file():
            raise ValueError(f"{prefix}lambada must be a jsonl file, and there is no {self.lambada}")

    def train_settings(self) -> Settings:
        """The settings that the product's steps read."""
        optimizer = OptimizerSettings(lr=self.learning_rate, weight_decay=self.weight_decay, clip=self.clip)
        return Settings(
            steps=self.steps,
            seed=self.seed,
            device=self.device,
            precision=self.precision,
            graph=self.graph,
            compile=self.compile,
            recompute=self.recompute,
            data=DataSettings(context=self.context, separate_documents=self.separate_documents),
            batch=BatchSettings(self.batch, self.micro),
            optimizer=override(optimizer, self.optimizer, "a text run", "optimizer."),
            schedule=ScheduleSettings(self.schedule, round(self.warmup * self.steps), self.final),
            validation=ValidationSettings(sequences=max(1, self.validation_tokens // self.context)),
        )


def build(model: Mapping[str, Any], vocab_size: int, end: int) -> PrismForCausalLM:
    """A model from the arguments of its configuration."""
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return PrismForCausalLM(PrismConfig(**{"vocab_size": vocab_size, **tokens, **model}))


def sizes(model: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
    """Parameters of a model, and numbers in its state (for layers that cache tokens: per token)."""
    return _sizes(json.dumps(dict(model), sort_keys=True), vocab_size)


@cache
def _sizes(model: str, vocab_size: int) -> tuple[int, int]:
    """Each model is built once: a plan asks for many, and for the same ones in every task."""
    with torch.device("meta"):
        built = build(json.loads(model), vocab_size, 0)
    return count_parameters(built), state_size(built)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())  # tied weights are one parameter


def state_size(model: nn.Module) -> int:
    return sum(part.state_size for part in model.modules() if isinstance(part, Mixer))


@without_subnormals()
def train_text(settings: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Train a language model and measure it.

    Returns:
        `scores` (test nats a token first), `validation` (nats a token of the whole split), `better`, `metric`, `curve`,
        `parameters`, `state_size`, `tokens`, `seconds`, `corpus` (which data it was: a path does not say), and `text`:
        everything that was measured, by split and context.
    """
    run = TextRun.of(settings)
    torch.set_num_threads(run.threads)
    corpus = open_corpus(Path(run.data), verify=False)
    check_contexts(run, corpus)
    task, stepper = prepare(run, corpus)
    curve = Curve(run, task, stepper)
    loop = Loop(stepper, [Tell(report), curve])
    loop.run()
    stepper.graphed = None  # a captured graph keeps its memory, and other trainings share the GPU
    model = stepper.model.eval()
    assert isinstance(model, PrismForCausalLM)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    with stepper.autocast():
        measured = measure(run, corpus, model)
    validation = measured["validation"][str(run.context)]
    scores = {}
    if run.test:
        test = measured["test"][str(run.context)]
        scores = {"nats": test["nats_per_token"], "bits per byte": test["bits_per_byte"]}
        scores["repeated rare bigrams"] = test["bigrams"]["repeated_rare"]["nats_per_token"]
        scores |= {f"nats at {length:,}": measured["test"][str(length)]["nats_per_token"] for length in run.contexts}
    return {
        "scores": scores,
        "validation": validation["nats_per_token"],
        "better": "lower",
        "metric": "nats a token",
        "curve": curve.points,
        "parameters": count_parameters(model),
        "state_size": state_size(model),
        "state_bytes": 4 * state_size(model),
        "tokens": run.steps * run.batch * run.context,
        "seconds": curve.seconds,
        "tokens_per_second": curve.speed,
        "skipped": loop.skipped,
        "corpus": about_corpus(corpus),
        "text": measured,
    }


def about_corpus(corpus: Corpus) -> dict[str, Any]:
    """A hash of all tokens and splits, and the size of each split in tokens and documents."""
    splits = {name: {"tokens": s.tokens, "documents": s.documents} for name, s in corpus.manifest.splits.items()}
    return {"digest": corpus.manifest.digest, **splits}


def check_contexts(run: TextRun, corpus: Corpus) -> None:
    """Refuse a context that is longer than a split it is measured on: before hours of training, not after them."""
    wanted = [("train", run.context), ("validation", run.context)]
    wanted += [("test", context) for context in (run.context, *run.contexts) if run.test]
    for split, context in wanted:
        found = corpus.manifest.splits.get(split)
        if found is None:
            raise ValueError(f"the tokens in {run.data} have no split {split!r}: prepare them with one")
        if found.tokens <= context:
            name = "context" if context == run.context else "contexts"
            raise ValueError(
                f"options.{name} has {context:,} tokens, but the split {split!r} of {run.data} has only {found.tokens:,}: "
                "take a shorter context, or more text"
            )


def prepare(run: TextRun, corpus: Corpus) -> tuple[LanguageTask, Stepper]:
    """The task of a run, and its model on the device with optimizers, ready for the first step."""
    given = run.train_settings()
    given.check()
    task = LanguageTask(given, corpus, None, lambda _, vocab_size, end: build(run.model, vocab_size, end))
    world = World(pick_device(run.device))
    model = task.build()
    if run.graph:
        check_graph(model, world.device, world.size)
    task.initialize(model)
    stepper = Stepper(task, world, model.to(world.device))
    stepper.prepare()
    stepper.model.train()
    return task, stepper


class Curve(Callback):
    """Points of a training: the mean loss since the last one, and a short validation."""

    def __init__(self, run: TextRun, task: LanguageTask, stepper: Stepper) -> None:
        self.run, self.task, self.stepper = run, task, stepper
        self.points: list[dict[str, Any]] = []
        self.losses: list[float] = []
        """Of the steps since the last point."""
        self.wanted = {round(run.steps * (i + 1) / run.evaluations) for i in range(run.evaluations)}
        self.seconds = 0.0
        """Of training, without validations."""
        self.started = time.perf_counter()
        self.warm: float | None = None
        """Seconds of the first steps, which compile kernels."""

    def settled(self, loop: Loop, step: Settled) -> None:
        if step.finite:
            self.losses.append(step.loss)

    def due(self, loop: Loop) -> bool:
        return loop.step in self.wanted or loop.step == _WARM

    def after(self, loop: Loop) -> bool:
        seconds = self.seconds + time.perf_counter() - self.started
        if loop.step == _WARM:
            self.warm = seconds
        if loop.step in self.wanted:
            self.seconds = seconds
            self.add_point(loop.step)
            self.started = time.perf_counter()
        return False

    def add_point(self, step: int) -> None:
        with self.stepper.autocast():
            score = self.task.validation.score(self.stepper.model, self.stepper.world, self.stepper.at_once)
        recent = float(np.mean(self.losses)) if self.losses else None
        self.losses = []
        tokens = step * self.run.batch * self.run.context
        self.points.append(
            {"step": step, "tokens": tokens, "seconds": self.seconds, "loss": recent, "validation": score.nats}
        )

    @property
    def speed(self) -> float:
        """Tokens a second after the first steps; 0 if there were no others."""
        if self.warm is None or self.run.steps <= _WARM:
            return 0.0
        return (self.run.steps - _WARM) * self.run.batch * self.run.context / max(1e-9, self.seconds - self.warm)


_WARM = 10
"""Steps that are not timed."""
_TOKENS_AT_ONCE = 1 << 16
"""Tokens of a forward pass in the final measurements."""


def measure(run: TextRun, corpus: Corpus, model: PrismForCausalLM) -> dict[str, Any]:
    """Everything that is measured at the end: by split and context, and LAMBADA."""
    found: dict[str, Any] = {
        "validation": {str(run.context): score_split(run, corpus, model, "validation", run.context)}
    }
    if run.test:
        lengths = dict.fromkeys((run.context, *run.contexts))
        found["test"] = {str(length): score_split(run, corpus, model, "test", length) for length in lengths}
    if run.test and run.lambada is not None:
        tokenizer = load_tokenizer(corpus.tokenizer_file, corpus.manifest.end_token)
        found["lambada"] = lambada(model, tokenizer, read_passages(Path(run.lambada)), batch=64)
    return found


def score_split(run: TextRun, corpus: Corpus, model: PrismForCausalLM, split: str, context: int) -> dict[str, Any]:
    """Nats a token, bits per byte, loss by position and on repeated rare bigrams of a whole split, in separate contexts."""
    stream, device = corpus.stream(split), model.device
    end = corpus.manifest.end if run.separate_documents else None
    sequences = Sequences(stream, context, end)
    rows = max(1, _TOKENS_AT_ONCE // sequences.context)
    found = Breakdown()
    for first in range(0, len(sequences), rows):
        batch = sequences.batch(np.arange(first, min(first + rows, len(sequences))))
        there = batch.to(device)
        with torch.no_grad():
            out = model(there.inputs, reset=there.reset, use_cache=False, **WANTED)
        nats = head_nats(model, out.hidden_states[-1], there.targets)
        for inputs, targets, losses in zip(
            batch.inputs.numpy(), batch.targets.numpy(), nats.cpu().numpy(), strict=True
        ):
            found.add(History(end), inputs, targets, losses)
    codes, counts = training_counts(corpus, split)
    mean = found.total.result()["nats_per_token"]
    score = Score(mean, stream.split.text_bytes / stream.split.tokens)
    return {
        "nats_per_token": mean,
        "bits_per_byte": score.bits_per_byte,
        "tokens": found.total.tokens,
        "positions": found.positions(),
        "bigrams": found.rare_bigrams(codes, counts, run.rare),
    }
