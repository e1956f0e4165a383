"""Open a model folder to adapt it, open one with a saved adapter, and write one with a LoRA adapter merged."""

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

from prism.files import check_weights, read_json, seal_weights, whole_folder
from prism.language.adapt_export import write_adapter
from prism.language.adapter_files import ADAPTER, CONFIG, DIGEST, WEIGHTS, config_bytes
from prism.language.cards import merged_card
from prism.language.export import write_model
from prism.language.generate import LanguageModel, open_model, with_tokenizer
from prism.language.tune_export import CHAT_FILES, USE
from prism.messages import say
from prism.models.auto import name_classes
from prism.models.loading import holds_own_model, open_causal_lm, without_progress_bars
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

    import prism.hf.adapters  # noqa: F401  (registers the type)

    with resolve_model_folder(path, _write_any, say) as folder:
        _check_adapter(folder, lm)
        model = PeftModel.from_pretrained(lm.model, folder, torch_device=str(lm.device))
    return replace(lm, model=model.get_base_model().eval(), name=f"{lm.name} with {path.resolve().name}")


def write_merged(path: Path, out: Path) -> Path:
    """Write the base of a LoRA adapter with the adapter merged into its weights, completely or not at all.

    Args:
        path: the folder of an adapter, or a run that trains one.
        out: the model folder; an existing one is replaced.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no folder {path}")
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} holds no adapter, so there is nothing to merge: use it as it is, without --merge")
    from peft import PeftModel

    from prism.hf.adapters.layer import MERGING

    config = read_json(path / CONFIG)
    if config["peft_type"] == "PRISM":
        raise ValueError(MERGING)
    base = Path(config["base_model_name_or_path"])
    if not base.exists():
        raise FileNotFoundError(
            f"there is no {base}, the base of the adapter in {path}: run this where the adapter was trained, or correct "
            f"base_model_name_or_path in its {CONFIG}"
        )
    with resolve_model_folder(path, _write_any, say) as folder, resolve_model_folder(base, write_model, say) as start:
        lm = open_adaptable(start, "cpu")
        _check_adapter(folder, lm)
        model: Any = PeftModel.from_pretrained(lm.model, folder, torch_device="cpu").merge_and_unload(safe_merge=True)
        stored = read_json(start / "config.json")
        stored_dtype = getattr(torch, str(stored.get("dtype") or stored.get("torch_dtype")), None)
        if not lm.own and isinstance(stored_dtype, torch.dtype):  # own models are written in float32 by all commands
            model = model.to(stored_dtype)
        with whole_folder(out, "the model") as target:
            with without_progress_bars():
                model.save_pretrained(target)
            if lm.own:
                name_classes(target)
            for name in CHAT_FILES:
                source = next((each / name for each in (folder, start) if (each / name).is_file()), None)
                if source is not None:
                    (target / name).write_bytes(source.read_bytes())
            card = folder / "README.md"
            trained = card.read_text(encoding="utf-8") if card.is_file() else ""
            text = merged_card(path.resolve().name, str(base), trained, USE)
            (target / "README.md").write_text(text, encoding="utf-8")
            seal_weights(target)
    return out


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
