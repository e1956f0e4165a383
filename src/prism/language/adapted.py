"""Open a model folder to adapt it, and open one with a saved adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from prism.files import check_weights
from prism.language.adapt_export import CONFIG, DIGEST, WEIGHTS, write_adapter
from prism.language.export import write_model
from prism.language.generate import LanguageModel, open_model, with_tokenizer
from prism.messages import say
from prism.models.loading import holds_own_model, open_causal_lm
from prism.train.export import resolve_model_folder

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


def with_adapter(lm: LanguageModel, path: Path) -> LanguageModel:
    """A model with the adapter in a folder, or of a run of `prism adapt`. Its layers are replaced in place."""
    from peft import PeftModel

    import prism.adapters  # noqa: F401  (registers the type)

    with resolve_model_folder(path, write_adapter, say) as folder:
        _check_adapter(folder, lm)
        model = PeftModel.from_pretrained(lm.model, folder, torch_device=str(lm.device))
    return replace(lm, model=model.get_base_model().eval(), name=f"{lm.name} with {path.resolve().name}")


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
