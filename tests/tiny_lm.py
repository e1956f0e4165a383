"""Saved language models for tests: a few thousand weights, so large that no part of them goes unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from prism.language.tokenizer import ByteTokenizer, Tokenizer
from prism.models import PrismConfig, PrismForCausalLM


def save_lm(folder: Path, layers: Any = "prism*2", tokenizer: Tokenizer | None = None, seed: int = 0) -> Path:
    """A model whose embedding has a few rows more than there are tokens, as trained ones have."""
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    torch.manual_seed(seed)
    config = PrismConfig(
        vocab_size=tokenizer.size + 7,
        hidden_size=16,
        num_heads=2,
        layers=layers,
        intermediate_size=24,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.end,
        eos_token_id=tokenizer.end,
        pad_token_id=tokenizer.end,
    )
    model = PrismForCausalLM(config)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.4)
        elif isinstance(part, nn.RMSNorm):  # vectors tell models apart, so they should differ
            nn.init.normal_(part.weight, 1.0, 0.1)
    nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    with torch.no_grad():  # few bytes beyond ASCII, which seldom make a character, and few ends
        model.lm_head.weight[128:] *= 0.5
        model.lm_head.weight[tokenizer.end] *= 0.2
    model.save_pretrained(folder)
    save_tokenizer(folder, tokenizer)
    return folder


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "definition.json").write_text(tokenizer.definition)
    end = tokenizer.end_token
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "definition.json"), bos_token=end, eos_token=end, pad_token=end
    )
    fast.save_pretrained(folder)
    (folder / "definition.json").unlink()
