"""The weights in a model folder, opened for use: what does not fit is refused before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from prism.device import pick_device
from prism.files import check_weights, read_json
from prism.models.quiet import without_progress_bars

Model = TypeVar("Model", bound=PreTrainedModel)


def open_weights(kind: type[Model], folder: Path, device: str = "auto") -> Model:
    """The model of this kind that `save_pretrained` wrote to a folder, on its device and ready to predict."""
    if not folder.exists():
        raise FileNotFoundError(f"there is no model folder {folder}")
    if folder.suffix == ".safetensors":
        raise ValueError(f"{folder} is a file of weights: give the folder that holds it and its config.json")
    _check_kind(kind, folder)
    check_weights(folder)
    where = pick_device(device)
    model, report = _load(kind, folder, "auto" if where.type == "cuda" else torch.float32)
    for what, names in (("lacks", report["missing_keys"]), ("has unknown", report["unexpected_keys"])):
        if names:
            raise ValueError(f"{folder} {what} weights ({min(names)}): its config.json belongs to another model")
    _check_finite(model, folder)
    opened: Model = model.to(where).eval()
    return opened


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    """Refuse weights that are NaN or infinite: what a model computes from them means nothing."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            what = "NaN" if bool(weight.isnan().any()) else "infinite numbers"
            raise ValueError(f"the weights of the model in {folder} hold {what} ({name}): use an earlier checkpoint")


def _check_kind(kind: type[PreTrainedModel], folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} does not open as a model: it has no config.json")
    wanted = kind.config_class.model_type  # type: ignore[union-attr]  # both of ours have one
    found = read_json(config).get("model_type")
    if found != wanted:
        what = "PRISM recommender" if wanted == "prism_rec" else "PRISM model"
        raise ValueError(f"{folder} holds no {what}: model_type in its config.json is {found!r}, not {wanted!r}")


def _load(kind: type[PreTrainedModel], folder: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    try:
        with without_progress_bars():
            loaded: tuple[Any, dict[str, Any]] = kind.from_pretrained(  # type: ignore[assignment]  # a pair, with loading info
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, RuntimeError, SafetensorError) as error:  # transformers explains at length
        raise ValueError(f"{folder} does not open as a model: {str(error).strip().splitlines()[0]}") from error
    return loaded
