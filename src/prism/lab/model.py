"""The model that is trained on synthetic tasks: embeddings, layers of one rule, a head where something is asked.

A layer is norm → short convolution (the same for every rule) → mixer, then optionally norm → SwiGLU. Each has a residual
connection.

- Rules with a convolution of their own run without it: with equal convolutions the memories are compared.
- Every rule gets the same key and value width per head, so that scores can be compared by state size. Rules whose state is
  not K × V have other sizes, which the results give.
- Embedding and head are drawn before the layers: at one seed they are equal for every rule.
- There are no positions unless asked for: memories that forget know the order. Softmax has rotary ones by default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prism import rules
from prism.lab.tasks.task import Task
from prism.nn import Mixer
from prism.nn.block import SwiGLU, place_options
from prism.rules.parts import ShortConv
from prism.rules.rule import Span, check_integers, check_options


@dataclass(frozen=True)
class ModelSettings:
    """The sizes of a model, and its rule."""

    rule: str = "prism"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the rule (`steps`, `preset`, …)."""
    layers: int = 1
    width: int = 64
    heads: int = 1
    key_dim: int = 8
    value_dim: int | None = None
    """Value width of a head. None: `width / heads`."""
    conv_size: int = 4
    """Tokens that the convolution in front of every mixer spans; 1 means none."""
    hidden: int = 0
    """Width of the SwiGLU after every mixer; 0 means none."""
    positions: int = 0
    """Number of learned absolute positions, at least the longest sequence; 0 means none."""

    def __post_init__(self) -> None:
        check_integers(**{name: getattr(self, name) for name in ("layers", "width", "heads", "key_dim", "conv_size")})
        check_integers(0, hidden=self.hidden, positions=self.positions)
        check_options(rules.get(self.rule), self.options)  # Mixer would take an option such as `width` as its argument

    def mixer(self, index: int) -> Mixer:
        """The mixer of layer `index`."""
        value_dim = max(1, self.width // self.heads) if self.value_dim is None else self.value_dim
        sizes = {"key_dim": self.key_dim, "value_dim": value_dim, "conv_size": 1}
        options = rules.get(self.rule).with_sizes(sizes, self.options)
        return Mixer(self.rule, self.width, self.heads, **{**place_options(self.rule, index, self.layers), **options})


class Inputs(nn.Module):
    """Embeds a task's inputs: tokens `[B, T]`, tokens `[B, T, S]` (one table per place, summed), or numbers `[B, T, D]`."""

    def __init__(self, task: Task, width: int, positions: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # also where the model is built on the meta device
            example = task.sample(1, torch.Generator().manual_seed(0)).inputs
        self.places = example.shape[2] if example.ndim == 3 else 1
        self.vocabulary = task.vocabulary
        self.tokens = self.numbers = None
        if example.is_floating_point():
            self.numbers = nn.Linear(task.vocabulary, width, bias=False)
        else:
            self.tokens = nn.Embedding(self.places * task.vocabulary, width)
            nn.init.normal_(self.tokens.weight, std=0.02)  # a larger one drowns the output of the mixers
        self.positions = nn.Embedding(positions, width) if positions else None
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.tokens is None:
            assert self.numbers is not None
            x = self.numbers(inputs)
        elif inputs.ndim == 3:
            x = self.tokens(inputs + self.vocabulary * torch.arange(self.places, device=inputs.device)).sum(2)
        else:
            x = self.tokens(inputs)
        if self.positions is None:
            return x
        length = inputs.shape[1]
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"a sequence has {length} tokens, but there are {self.positions.num_embeddings} learned positions: "
                "set positions to the longest sequence, tests included"
            )
        return x + self.positions.weight[:length]


class ProbeModel(nn.Module):
    """A task's inputs `[B, T, …]` → logits or numbers `[M, answers]` at the M places (rows of `[B · T]`) that are asked."""

    def __init__(self, task: Task, settings: ModelSettings) -> None:
        super().__init__()
        width, layers = settings.width, range(settings.layers)
        self.inputs = Inputs(task, width, settings.positions)
        self.head = nn.Linear(width, task.answers, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in layers)
        self.convolutions = (
            nn.ModuleList(ShortConv(width, settings.conv_size) for _ in layers) if settings.conv_size > 1 else None
        )
        self.mixers = nn.ModuleList(settings.mixer(index) for index in layers)
        self.mlp_norms = nn.ModuleList(nn.RMSNorm(width) for _ in layers) if settings.hidden else None
        self.mlps = nn.ModuleList(SwiGLU(width, settings.hidden) for _ in layers) if settings.hidden else None
        self.norm = nn.RMSNorm(width)

    @property
    def state_size(self) -> int:
        """Number of values in all memories of one sequence; for caches, of one token."""
        return sum(mixer.state_size for mixer in self.mixers)  # type: ignore[misc]  # a ModuleList forgets what it holds

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, inputs: Tensor, asked: Tensor, shared: dict[str, Tensor] | None = None) -> Tensor:
        """`shared` is passed from layer to layer; a mixture of memories stores its balance loss there."""
        x = self.inputs(inputs)
        shared = {} if shared is None else shared
        for index, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            y = norm(x)
            if self.convolutions is not None:
                y = self.convolutions[index](y, None, Span())[0]
            x = x + mixer(y, shared=shared)[0]
            if self.mlps is not None and self.mlp_norms is not None:
                x = x + self.mlps[index](self.mlp_norms[index](x))
        return self.head(self.norm(x.flatten(0, 1)[asked]))
