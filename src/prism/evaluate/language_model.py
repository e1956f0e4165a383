"""A saved language model and its tokenizer, opened for use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from prism.data.tokenizer import Tokenizer, load_tokenizer
from prism.files import read_json
from prism.models import PrismForCausalLM
from prism.models.loading import open_weights


@dataclass(frozen=True)
class LanguageModel:
    model: PrismForCausalLM
    tokenizer: Tokenizer
    name: str

    @property
    def device(self) -> torch.device:
        return self.model.device


def open_model(folder: Path, device: str = "auto") -> LanguageModel:
    """The model in a folder that `save_pretrained` or `prism train lm` wrote, ready to predict."""
    model = open_weights(PrismForCausalLM, folder, device)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json, which turns text into the model's tokens and back")
    tokenizer = load_tokenizer(folder / "tokenizer.json", _end_token(folder))
    if tokenizer.size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.size} tokens, the model knows {model.config.vocab_size}"
        )
    place = folder.resolve()
    return LanguageModel(model, tokenizer, place.parent.name if place.name == "model" else place.name)


def _end_token(folder: Path) -> str | None:
    """The end token that the folder names; None leaves it to the usual names."""
    path = folder / "tokenizer_config.json"
    name = read_json(path).get("eos_token") if path.is_file() else None
    return name.get("content") if isinstance(name, dict) else name
