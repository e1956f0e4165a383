"""A language model of a few hundred weights in plain torch: the loop must not care what it trains.

Its dropout makes the loss depend on the random state, so that a checkpoint which forgot it would be found out.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from prism.engine import InvalidValueError
from prism.language.settings import ModelSettings
from prism.nn.parameters import assign


class StandinLayer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, reset: Tensor | None) -> Tensor:
        """Every token sees itself and the one before it, unless a document starts."""
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        if reset is not None:
            before = torch.where(reset.unsqueeze(-1), 0.0, before)
        gate, value = self.up(self.norm(x + before)).chunk(2, -1)
        return x + self.down(self.dropout(torch.nn.functional.silu(gate) * value))


class Standin(nn.Module):
    _no_split_modules = ("StandinLayer",)

    def __init__(self, vocab_size: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(StandinLayer(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def init_weights(self) -> None:
        self.calls.zero_()
        for name, parameter in self.named_parameters():
            ones = name.endswith("norm.weight")
            draw = torch.ones(parameter.shape) if ones else torch.normal(0.0, 0.1, tuple(parameter.shape), device="cpu")
            assign(parameter, draw)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, reset: Tensor | None, use_cache: bool) -> SimpleNamespace:
        if self.training:
            self.calls += 1
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, reset)
        return SimpleNamespace(logits=self.head(x))

    def save_pretrained(self, folder: Path) -> None:
        save_file({name: value.detach() for name, value in self.named_parameters()}, folder / "model.safetensors")


class Poisoned(Standin):
    """Something is not finite in `length` training passes from pass `first` on.

    Args:
        kind: "loss", "gradient" (of a finite loss), or "engine" (its checks raise).
        rank: the one process that has the fault.
    """

    def __init__(self, kind: str, length: int, first: int = 10, dropout: float = 0.0, rank: int = 0) -> None:
        super().__init__(320, 16, 2, dropout)
        self.kind, self.faults, self.count = kind, range(first, first + length), 0
        self.here = rank == int(os.environ.get("RANK", "0"))

    def forward(self, input_ids: Tensor, reset: Tensor | None, use_cache: bool) -> SimpleNamespace:
        out = super().forward(input_ids, reset, use_cache)
        self.count += self.training
        if self.training and self.here and self.count in self.faults:
            if self.kind == "engine":
                raise InvalidValueError("log_decay holds NaN; it must be finite and ≤ 0")
            if self.kind == "loss":
                out.logits = out.logits * float("inf")
            else:
                out.logits = out.logits + (self.embed.weight.sum() * 0).sqrt() * 0
        return out


def build_plain(settings: ModelSettings, vocab_size: int, end: int) -> nn.Module:
    return Standin(vocab_size, settings.hidden_size, settings.num_hidden_layers, 0.0)


def build_with_dropout(settings: ModelSettings, vocab_size: int, end: int) -> nn.Module:
    return Standin(vocab_size, settings.hidden_size, settings.num_hidden_layers, 0.2)


def build_poisoned(settings: ModelSettings, vocab_size: int, end: int) -> nn.Module:
    """The second process has a loss that is not finite in steps 3 and 4."""
    return Poisoned("loss", length=2, first=3, rank=1)
