"""Build a language model from settings."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from prism.language.settings import ModelSettings
from prism.language.tokens import Manifest
from prism.models import PrismConfig, PrismForCausalLM
from prism.train.model import rule_options

Builder = Callable[[ModelSettings, int, int], nn.Module]
"""(settings, vocabulary size, end token) → a `PrismForCausalLM`, or a model called as `model(input_ids=…, reset=…,
use_cache=False).logits`."""


def build_model(settings: ModelSettings, vocab_size: int, end: int) -> nn.Module:
    """A `PrismForCausalLM`; `end` is its begin, end and padding token."""
    config = PrismConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        layers=settings.layers,
        num_hidden_layers=settings.num_hidden_layers,
        rule_options=rule_options(settings),
        intermediate_size=settings.intermediate_size,
        tie_word_embeddings=settings.tie_word_embeddings,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = PrismForCausalLM(config)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def vocabulary(settings: ModelSettings, manifest: Manifest) -> int:
    """Rows of the embedding: `vocab_size`, or the tokenizer's size rounded up to a multiple of 64 (faster on GPUs)."""
    if settings.vocab_size is None:
        return -(-manifest.vocab_size // 64) * 64
    if settings.vocab_size < manifest.vocab_size:
        raise ValueError(
            f"model.vocab_size is {settings.vocab_size}, but the tokenizer has {manifest.vocab_size} tokens: "
            "omit model.vocab_size or make it at least that"
        )
    return settings.vocab_size
