"""A saved language model and its tokenizer, opened for use."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from prism.data.files import read_json
from prism.data.tokenizer import Tokenizer, load_tokenizer
from prism.evaluate.saved_model import open_weights
from prism.models import PrismForCausalLM

_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")
"""Entries of a configuration that do not change what a model computes."""


@dataclass(frozen=True)
class LanguageModel:
    model: PrismForCausalLM
    tokenizer: Tokenizer
    name: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def config_sha256(self) -> str:
        """What the model is: the same for every model that computes alike, given the same weights."""
        contents = {k: v for k, v in self.model.config.to_dict().items() if k not in _SAYS_NOTHING}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    @property
    def weights_sha256(self) -> str:
        """Of norms, gates and other vectors: little to read, and training moves them all."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            if parameter.ndim == 1:
                digest.update(name.encode())
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()


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
    return LanguageModel(model, tokenizer, folder.resolve().name)


def _end_token(folder: Path) -> str | None:
    """The end token that the folder names; None leaves it to the usual names."""
    path = folder / "tokenizer_config.json"
    name = read_json(path).get("eos_token") if path.is_file() else None
    return name.get("content") if isinstance(name, dict) else name
