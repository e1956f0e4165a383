"""Open a model folder to adapt it, and open one with a saved adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from prism.files import check_weights
from prism.language.adapt_export import write_adapter
from prism.language.adapter_files import ADAPTER, CONFIG, DIGEST, WEIGHTS, config_bytes
from prism.language.export import write_model
from prism.language.generate import LanguageModel, open_model, with_tokenizer
from prism.messages import say
from prism.models.loading import holds_own_model, open_causal_lm
from prism.train.checkpoint import Checkpoint
from prism.train.export import resolve_model_folder
from prism.train.run import stored_config

_SAMPLE = 64


@dataclass(frozen=True)
class Base:
    """A model to adapt, and where its files are."""

    lm: LanguageModel
    folder: Path
    source: Path
    """The folder to name in an adapter: unlike `folder`, it is never temporary."""
    digest: str


@contextmanager
def open_base(path: Path, device: str) -> Iterator[Base]:
    """Open a model folder, or a run folder of `prism train lm`. Its files may be temporary: they exist until the end."""
    with resolve_model_folder(path, write_model, say) as folder:
        lm = open_adaptable(folder, device)
        source = folder if folder in (path, path / "model") else path
        yield Base(lm, folder, source, digest(lm.model))


def open_adaptable(folder: Path, device: str = "auto") -> LanguageModel:
    """Open the folder of a model that may get an adapter: one of this library, or of transformers."""
    return (
        open_model(folder, device)
        if holds_own_model(folder)
        else with_tokenizer(open_causal_lm(folder, device), folder)
    )


def digest(model: Any) -> str:
    """A hash that tells bases of the same sizes apart: the first numbers of every weight."""
    found = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        found.update(f"{name} {list(weight.shape)}".encode())
        found.update(weight.detach().flatten()[:_SAMPLE].float().cpu().numpy().tobytes())
    return found.hexdigest()


def attach(base: Base, config: Any, seed: int, gradient_checkpointing: bool) -> tuple[bytes, nn.Module]:
    """Put a new adapter on a base, whose layers are replaced in place: its adapter_config.json, and the model to train.

    Args:
        config: a `PeftConfig`.
    """
    from peft import get_peft_model

    torch.manual_seed(seed)
    wrapped = get_peft_model(base.lm.model, config, adapter_name=ADAPTER)
    model: Any = wrapped.get_base_model()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if not base.lm.own:
        model.register_forward_pre_hook(_without_reset, with_kwargs=True)
    return config_bytes(wrapped, base.source), model


def _without_reset(model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove an argument that models of transformers do not know. It is None: the settings are checked."""
    assert given.get("reset") is None
    return args, {name: value for name, value in given.items() if name != "reset"}


def with_adapter(lm: LanguageModel, path: Path) -> LanguageModel:
    """A model with the adapter in a folder, or of a run that trains one. Its layers are replaced in place."""
    from peft import PeftModel

    import prism.adapters  # noqa: F401  (registers the type)

    with resolve_model_folder(path, _write_any, say) as folder:
        _check_adapter(folder, lm)
        model = PeftModel.from_pretrained(lm.model, folder, torch_device=str(lm.device))
    return replace(lm, model=model.get_base_model().eval(), name=f"{lm.name} with {path.resolve().name}")


def _write_any(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    """Write what a run trains, by its task."""
    adapts = (stored_config(run) or {}).get("task") == "adapt"
    (write_adapter if adapts else write_model)(run, checkpoint, folder)


def _check_adapter(folder: Path, lm: LanguageModel) -> None:
    """Raise an error unless the folder holds an adapter for this model, as safetensors."""
    if not folder.exists():
        raise FileNotFoundError(f"there is no adapter folder {folder}")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no adapter: it has no {name}")
    check_weights(folder)
    with safe_open(folder / WEIGHTS, "pt") as weights:
        expected = (weights.metadata() or {}).get(DIGEST)
    if expected is not None and expected != digest(lm.model):
        raise ValueError(f"the adapter in {folder} was trained on another model than {lm.name}: give its own base")
