"""Small language models for tests, with weights so large that every part affects the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prism import rules
from prism.models import PrismConfig, PrismForCausalLM
from prism.nn.pattern import parse_layers

VOCABULARY = 61
HYBRIDS = ("prism*2+softmax", "gated_delta+sliding_window", "rwkv7+softmax+mamba2+rwkv7")
STACKS = (*((name, name) for name in rules.names()), *HYBRIDS)
SMALL = {"sliding_window": {"window": 9}}
"""Options that make a rule show its corners in a few tokens."""


def config(layers: Any, **settings: Any) -> PrismConfig:
    used = {layer.rule for layer in parse_layers(layers)}
    options = {name: value for name, value in SMALL.items() if name in used}
    options = {**options, **settings.pop("rule_options", {})}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24}
    # Tied embeddings tend to repeat one token forever, independent of the mixers.
    return PrismConfig(layers=layers, rule_options=options, **{"tie_word_embeddings": False, **sizes, **settings})


def model(layers: Any, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> PrismForCausalLM:
    """In evaluation mode. All linear maps are redrawn: rules initialise some with zeros, which would hide other parts."""
    torch.manual_seed(seed)
    built = PrismForCausalLM(config(layers, **settings)).to(dtype).eval()
    for part in built.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.4)
    nn.init.normal_(built.get_input_embeddings().weight, std=1.0)
    return built


def tokens(batch: int, count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, count), generator=generator, device="cpu")


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts `[T_i]` as one batch `[B, max T]` and its attention mask."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.cat([torch.zeros(width - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    return ids, mask


def label(layers: Any) -> str:
    return layers if isinstance(layers, str) else "+".join(map(str, layers))
