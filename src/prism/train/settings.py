"""Every choice of a training run, with its meaning. The text under a field is its help on the command line.

`RunSettings` is what the loop reads, whatever is learned; `Settings` adds what a language model and its text need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class StackSettings:
    """The stack of layers, whatever stands before and after it."""

    layers: str = "prism"
    """The rule of every layer, or a pattern such as prism*3+softmax that is repeated over the layers."""
    hidden_size: int = 128
    """Width of the model."""
    num_hidden_layers: int = 4
    """Number of layers."""
    num_heads: int = 2
    """Memories side by side in each layer."""
    head_dim: int | None = 64
    """Size of a head's keys and values, for rules that let it be chosen (kernels like 64 and 128); None: the rule's own."""
    options: tuple[str, ...] = ()
    """Options of rules, as rule.option=value, for example prism.steps=3 softmax.kv_heads=2."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    weights: Path | None = None
    """Start from these weights: a safetensors file, or a folder that holds a saved model."""


@dataclass(frozen=True)
class BatchSettings:
    sequences: int = 16
    """Samples in one step, over all processes together."""
    micro: int | None = None
    """At most this many at once in one process; the gradients of the rest are accumulated. None: all of its share."""


@dataclass(frozen=True)
class OptimizerSettings:
    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of hidden layers, AdamW for the rest."""
    lr: float = 2e-3
    """Learning rate at its height."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    eps: float = 1e-8
    """AdamW's ε."""
    momentum: float = 0.95
    """Muon's."""
    weight_decay: float = 0.1
    """Not for gates, skips, norms and biases."""
    clip: float | None = 1.0
    """Largest norm of the gradient; None: as it comes."""


@dataclass(frozen=True)
class ScheduleSettings:
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: a cosine, a plateau with a linear end (warm-up, stable, decay), or no change."""
    warmup: int = 50
    """Steps of linear warm-up."""
    final: float = 0.1
    """Where the learning rate ends, as a share of its height (cosine, wsd)."""
    decay: float = 0.2
    """Share of the steps that the decay of wsd takes."""


@dataclass(frozen=True)
class ValidationSettings:
    every: int = 100
    """Steps between validations; 0: only after the last step."""
    sequences: int = 64
    """Samples validated on, spread evenly over what was held out; 0: all of it."""
    patience: int = 0
    """Stop after this many validations in a row without a new best, and end with the best model; 0: train to the end."""


@dataclass(frozen=True)
class CheckpointSettings:
    every: int = 100
    """Steps between checkpoints; 0: only after the last step and when the run is stopped."""
    keep: int = 2
    """How many to keep."""


@dataclass(frozen=True)
class LogSettings:
    every: int = 10
    """Steps between lines of log.jsonl."""
    tensorboard: bool = False
    """Write TensorBoard events as well."""


@dataclass(frozen=True)
class RunSettings:
    """What every run has."""

    preset: str | None = None
    """Sizes to start from."""
    config: Path | None = None
    """A TOML file with any of these settings."""
    out: Path = Path("runs/run")
    """The run folder: checkpoints, log, settings and, at the end, the model."""
    resume: bool = True
    """Go on from the newest good checkpoint if the run folder has one."""
    steps: int = 600
    """Optimiser steps in all."""
    seed: int = 0
    """Decides the initial weights and the order of the samples."""
    device: str = "auto"
    """cpu, cuda …; auto: cuda where there is one."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """What matrix products are computed in (weights stay float32); auto: bf16 on cuda, fp32 elsewhere."""
    compile: bool = False
    """Compile the layers with torch.compile."""
    parallel: Literal["auto", "none", "ddp", "fsdp"] = "auto"
    """How several processes (torchrun) share the work; auto: fsdp when there are several."""
    max_skips: int = 10
    """Stop after this many steps in a row with a loss or gradient that is not finite."""
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def least(self) -> dict[str, tuple[float | None, float]]:
        """By name: a value, which may be left out (None), and the least it can be."""
        return {
            "steps": (self.steps, 1),
            "max_skips": (self.max_skips, 1),
            "batch.sequences": (self.batch.sequences, 1),
            "batch.micro": (self.batch.micro, 1),
            "schedule.warmup": (self.schedule.warmup, 0),
            "validation.every": (self.validation.every, 0),
            "validation.sequences": (self.validation.sequences, 0),
            "validation.patience": (self.validation.patience, 0),
            "checkpoint.every": (self.checkpoint.every, 0),
            "checkpoint.keep": (self.checkpoint.keep, 1),
            "log.every": (self.log.every, 1),
        }

    def check(self) -> None:
        """Refuse values that no run can have. (Not at construction: tyro would wrap the sentence in a box.)"""
        for name, (value, lowest) in self.least().items():
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        if not 0 <= self.schedule.decay <= 1 or not 0 <= self.schedule.final <= 1:
            raise ValueError("schedule.decay and schedule.final are shares: they must lie between 0 and 1")
        how = self.optimizer
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= getattr(how, name) < math.inf:
                raise ValueError(f"optimizer.{name} must be at least 0, got {getattr(how, name)}")
        if not all(0 <= share < 1 for share in (*how.betas, how.momentum)):
            raise ValueError("optimizer.betas and optimizer.momentum must be at least 0 and below 1")
        if how.clip is not None and not 0 < how.clip < math.inf:
            raise ValueError(f"optimizer.clip must be above 0 (None: gradients as they come), got {how.clip}")
