"""Settings of a training run, shared by all tasks. The docstring of a field is its help text on the command line.

`RunSettings` holds what the training loop reads. The tasks add their own sections: `prism.language.settings` and
`prism.recommend.settings`. A field with `metadata={"min": n}` is refused below n. One with `metadata={"short": True}` is what
the bare name of its section sets, as in `--parallel ddp` for `--parallel.mode ddp`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from prism.train.trackers import check_trackers


@dataclass(frozen=True)
class StackSettings:
    """The stack of layers, shared by the models of all tasks."""

    layers: str = "prism"
    """Rule of every layer, or a pattern such as prism*3+softmax that is repeated over the layers. Options of single layers
    are in parentheses: prism(steps=1)*3+prism(steps=2)."""
    hidden_size: int = 128
    """Width of the model."""
    num_hidden_layers: int = 4
    """Number of layers."""
    num_heads: int = 2
    """Number of heads per layer; each head has its own memory."""
    head_dim: int | None = 64
    """Key and value size per head, for rules that let you choose it (kernels are fastest at 64 and 128). None: the rule's
    default."""
    options: tuple[str, ...] = ()
    """Rule options as rule.option=value, for example prism.steps=3 softmax.kv_heads=2."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    weights: Path | None = None
    """Initial weights: a safetensors file, or the folder of a saved model. None: random."""


@dataclass(frozen=True)
class BatchSettings:
    sequences: int = field(default=16, metadata={"min": 1})
    """Global batch size: samples per step, summed over all processes."""
    micro: int | None = field(default=None, metadata={"min": 1})
    """Micro-batch size per process (gradient accumulation). None: the whole share at once."""


@dataclass(frozen=True)
class OptimizerSettings:
    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of hidden layers and AdamW for all other parameters."""
    lr: float = 2e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Beta coefficients of AdamW."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    momentum: float = 0.95
    """Momentum of Muon."""
    weight_decay: float = 0.1
    """Weight decay; not applied to gates, skips, norms and biases."""
    clip: float | None = 1.0
    """Maximum gradient norm. None: no clipping."""
    groups: tuple[str, ...] = ()
    """Parameters with another learning rate or weight decay, as pattern=lr:factor,wd:value: *.writes.*=lr:0.5,wd:0 halves
    the learning rate of PRISM's later writes and does not decay them. The pattern, with * and ?, must match whole names;
    of several that match, the first counts."""


class Group(NamedTuple):
    """One entry of `OptimizerSettings.groups`."""

    pattern: str
    lr: float = 1.0
    """Factor of the learning rate."""
    wd: float | None = None
    """Weight decay; None: that of the other parameters."""


def parse_group(text: str) -> Group:
    """Read `pattern=lr:factor,wd:value`; a ValueError says what is wrong."""
    pattern, _, rest = text.partition("=")
    rates: dict[str, float] = {}
    for item in rest.split(","):
        name, _, value = (part.strip() for part in item.partition(":"))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not pattern or name not in ("lr", "wd") or name in rates or not 0 <= number < math.inf:
            raise ValueError(
                f"optimizer.groups has {text!r}: write pattern=lr:factor,wd:value with numbers ≥ 0 (one of the two is "
                "enough), for example *.writes.*=lr:0.5"
            )
        rates[name] = number
    return Group(pattern, **rates)


@dataclass(frozen=True)
class ScheduleSettings:
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warmup: cosine decay, wsd (warmup, stable, linear decay) or constant."""
    warmup: int = field(default=50, metadata={"min": 0})
    """Steps of linear warmup."""
    final: float = 0.1
    """Final learning rate as a fraction of the peak (cosine and wsd)."""
    decay: float = 0.2
    """Fraction of the steps spent in the decay phase (wsd)."""


@dataclass(frozen=True)
class ValidationSettings:
    every: int = field(default=100, metadata={"min": 0})
    """Steps between validations. 0: only after the last step."""
    sequences: int = field(default=64, metadata={"min": 0})
    """Validation samples, spread evenly over the held-out data. 0: all of them."""
    patience: int = field(default=0, metadata={"min": 0})
    """Early stopping: stop after this many validations without a new best, and export the best checkpoint. 0: off."""


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = field(default=100, metadata={"min": 0})
    """Steps between checkpoints. 0: only after the last step and on interruption."""
    keep: int = field(default=2, metadata={"min": 1})
    """Number of newest checkpoints to keep; with early stopping the best one is kept as well."""


@dataclass(frozen=True)
class ParallelSettings:
    mode: Literal["auto", "none", "ddp", "fsdp"] = field(default="auto", metadata={"short": True})
    """Data parallelism over the processes that torchrun starts (also: --parallel MODE). auto: fsdp if there is more than
    one."""
    context: int = field(default=1, metadata={"min": 1})
    """Processes that share each sequence, one part of it each. 1: every process has sequences of its own."""


@dataclass(frozen=True)
class LogSettings:
    every: int = field(default=10, metadata={"min": 1})
    """Steps between lines of log.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard event files; the same as --log.trackers tensorboard."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where metrics are sent besides log.jsonl: tensorboard, wandb (Weights & Biases) and mlflow, any number of them. Their
    usual environment variables apply, such as WANDB_MODE=offline and MLFLOW_TRACKING_URI."""

    @property
    def all_trackers(self) -> tuple[str, ...]:
        return (*self.trackers, *(("tensorboard",) if self.tensorboard else ()))


@dataclass(frozen=True)
class RunSettings:
    """The settings that every run has."""

    preset: str | None = None
    """Name of the preset to start from."""
    config: Path | None = None
    """TOML file with any of these settings."""
    out: Path = Path("runs/run")
    """Run folder: settings, log, checkpoints and, at the end, the exported model."""
    resume: bool = True
    """Resume from the newest good checkpoint if the run folder has one."""
    steps: int = field(default=600, metadata={"min": 1})
    """Total number of optimizer steps."""
    seed: int = 0
    """Random seed of the initial weights and the sample order."""
    device: str = "auto"
    """cpu, cuda, cuda:1 and so on. auto: cuda if available, else cpu."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of matrix products; weights stay in float32. auto: bf16 on cuda, fp32 elsewhere."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    recompute: Literal["auto", "none", "cheap"] = "auto"
    """Activations that are cheap to compute again are not kept for the backward pass: about a fifth less memory, a little more
    time, the same numbers. auto: cheap on cuda. (--model.gradient-checkpointing recomputes whole layers instead.)"""
    graph: bool = False
    """Replay forward and backward as a CUDA graph: faster where the GPU waits for Python, as with small models. Needs one
    process and no dropout."""
    max_skips: int = field(default=10, metadata={"min": 1})
    """Stop after this many consecutive steps with a non-finite loss or gradient."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def check(self) -> None:
        """Raise ValueError for values that no run can have. (Not at construction: tyro would put the message in a box.)"""
        for name, value, lowest in lower_bounds(self):
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        for name in ("decay", "final"):
            if not 0 <= getattr(self.schedule, name) <= 1:
                raise ValueError(
                    f"schedule.{name} is a fraction: it must be between 0 and 1, got {getattr(self.schedule, name)}"
                )
        optimizer = self.optimizer
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= getattr(optimizer, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be at least 0, got {getattr(optimizer, name)}")
        if not all(0 <= fraction < 1 for fraction in (*optimizer.betas, optimizer.momentum)):
            raise ValueError(
                "optimizer.betas and optimizer.momentum must be at least 0 and below 1, "
                f"got {optimizer.betas} and {optimizer.momentum}"
            )
        for text in optimizer.groups:
            parse_group(text)
        check_trackers(self.log.all_trackers)
        if optimizer.clip is not None and not 0 < optimizer.clip < math.inf:
            raise ValueError(f"optimizer.clip must be above 0 (None: no clipping), got {optimizer.clip}")


def lower_bounds(settings: Any, prefix: str = "") -> Iterator[tuple[str, float | None, float]]:
    """(dotted name, value, minimum) of every field with a `min` in its metadata, sections included."""
    for part in fields(settings):
        value = getattr(settings, part.name)
        if is_dataclass(value):
            yield from lower_bounds(value, f"{prefix}{part.name}.")
        elif "min" in part.metadata:
            yield f"{prefix}{part.name}", value, part.metadata["min"]
