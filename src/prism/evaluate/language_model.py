"""A saved language model and its tokenizer, opened for use."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prism.data.files import read_json
from prism.data.tokenizer import Tokenizer, load_tokenizer
from prism.models import PrismConfig, PrismForCausalLM
from prism.models.quiet import without_progress_bars

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
    if not folder.exists():
        raise FileNotFoundError(f"there is no model folder {folder}")
    if folder.suffix == ".safetensors":
        raise ValueError(f"{folder} is a file of weights: give the folder that holds it and its config.json")
    _check_kind(folder)
    where = pick_device(device)
    model, report = _load(folder, "auto" if where.type == "cuda" else torch.float32)
    for what, names in (("lacks", report["missing_keys"]), ("has unknown", report["unexpected_keys"])):
        if names:
            raise ValueError(f"{folder} {what} weights ({min(names)}): its config.json belongs to another model")
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json, which turns text into the model's tokens and back")
    tokenizer = load_tokenizer(folder / "tokenizer.json", _end_token(folder))
    if tokenizer.size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.size} tokens, the model knows {model.config.vocab_size}"
        )
    return LanguageModel(model.to(where).eval(), tokenizer, folder.resolve().name)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _check_kind(folder: Path) -> None:
    config = folder / "config.json"
    if config.is_file():
        kind = read_json(config).get("model_type")
        if kind != PrismConfig.model_type:
            raise ValueError(
                f"{folder} holds no PRISM model: model_type in its config.json is {kind!r}, not {PrismConfig.model_type!r}"
            )


def _load(folder: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    try:
        with without_progress_bars():
            loaded: tuple[Any, dict[str, Any]] = PrismForCausalLM.from_pretrained(  # type: ignore[assignment]
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, RuntimeError) as error:  # transformers explains at length
        raise ValueError(f"{folder} does not open as a model: {str(error).strip().splitlines()[0]}") from error
    return loaded


def _end_token(folder: Path) -> str | None:
    """The end token that the folder names; None leaves it to the usual names."""
    path = folder / "tokenizer_config.json"
    name = read_json(path).get("eos_token") if path.is_file() else None
    return name.get("content") if isinstance(name, dict) else name
