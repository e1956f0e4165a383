"""Open the weights in a model folder, and identify a model by its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from prism.device import pick_device
from prism.engine import token
from prism.files import check_weights, read_json


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch off transformers' progress bars, of which it draws one for every file that it reads or writes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


_IRRELEVANT = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "auto_map",
    "dtype",
    "use_cache",
    "dropout",
    "id_dropout",
    "form",
    "backend",
)
"""Entries of a configuration that do not affect what a model computes."""
_SAMPLE = 1024
"""About how many numbers of a matrix are hashed."""


def config_sha256(model: PreTrainedModel) -> str:
    """Hash of the configuration: equal for models that compute the same function, given the same weights.

    A model that has got new items (resize.py) keeps its hash: the states of users stay valid.
    """
    contents = {k: v for k, v in model.config.to_dict().items() if k not in _IRRELEVANT}
    if contents.get("grown_from"):
        return str(contents["grown_from"])
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def weights_sha256(model: PreTrainedModel) -> str:
    """Hash of norms, gates and other vectors: they are small, and training changes all of them."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            digest.update(name.encode())
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def maps_sha256(model: PreTrainedModel) -> str:
    """Hash of a sample of every matrix: a merged adapter changes matrices alone."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim > 1:
            digest.update(name.encode())
            numbers = parameter.detach().flatten()
            step = len(numbers) // _SAMPLE | 1  # odd, so that it does not stay in one column
            digest.update(numbers[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """Hashes of configuration and weights. They are saved with states, which are only valid for the same model."""
    return {**stable_fingerprint(model), "maps_sha256": maps_sha256(model)}


def stable_fingerprint(model: PreTrainedModel) -> dict[str, str]:
    """The part of the fingerprint that stays when a model grows; states of users have no more."""
    return {"config_sha256": config_sha256(model), "weights_sha256": weights_sha256(model)}


def fingerprint_mismatch(found: Mapping[str, str], model: PreTrainedModel) -> str | None:
    """How the model with the fingerprint `found` differs from `model`: "another configuration", "other weights", or None."""
    return mismatch(found, fingerprint(model))


def mismatch(found: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """As `fingerprint_mismatch`, for two fingerprints. States of users have no hash of the matrices."""
    if found.get("config_sha256") != here["config_sha256"]:
        return "another configuration"
    same = found.get("weights_sha256") == here["weights_sha256"]
    return None if same and found.get("maps_sha256") in (None, here["maps_sha256"]) else "other weights"


Model = TypeVar("Model", bound=PreTrainedModel)
_KINDS = {"prism": "PRISM language model", "prism_rec": "PRISM recommender"}
"""What a folder holds, by the model_type in its config.json."""


def open_weights(kind: type[Model], folder: Path, device: str = "auto") -> Model:
    """Load the model of this kind that `save_pretrained` wrote to a folder, on its device and in eval mode.

    A folder that does not hold exactly the weights of its config.json, all of them finite, is refused with a ValueError.
    """
    check_kind(kind, folder)
    model, unknown = _open(kind, folder, device)
    if unknown:
        raise ValueError(f"{folder} has unknown weights ({min(unknown)}): its config.json belongs to another model")
    opened: Model = model
    return opened


@torch.no_grad()
def by_columns(model: nn.Module) -> None:
    """Store wide weights on a CPU by columns, in place: a product with one row then takes half the time (engine/token.py).

    For models that are only read. Shapes, names and values stay; a saved model has its weights by rows again.
    """
    for part in model.modules():
        weight = part.weight if type(part) is nn.Linear else None
        if type(weight) is nn.Parameter and weight.device.type == "cpu" and token.is_wide(weight):
            weight.data = weight.mT.contiguous().mT


def open_causal_lm(folder: Path, device: str = "auto") -> PreTrainedModel:
    """Load a causal language model of transformers from a folder, as `open_weights` does. Weights must be safetensors."""
    from transformers import AutoModelForCausalLM

    _model_type(folder)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has no safetensors file: save the model again with save_pretrained")
    try:
        model: PreTrainedModel = _open(AutoModelForCausalLM, folder, device)[0]
    except ValueError as error:  # of a model that transformers does not know, it names all that it knows
        raise ValueError(str(error).splitlines()[0]) from error
    return model


def _open(kind: Any, folder: Path, device: str) -> tuple[Any, set[str]]:
    """A model on its device and in eval mode, all its weights finite, and the names of weights that it has no use for."""
    check_weights(folder)
    where = pick_device(device)
    model, report = _load(kind, folder, "auto" if where.type == "cuda" else torch.float32)
    if missing := report["missing_keys"]:
        raise ValueError(f"{folder} lacks weights ({min(missing)}): its config.json belongs to another model")
    _check_finite(model, folder)
    return model.to(where).eval(), set(report["unexpected_keys"])


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    """Refuse weights that are NaN or infinite."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            what = "NaN" if bool(weight.isnan().any()) else "infinite numbers"
            raise ValueError(f"the weights of the model in {folder} hold {what} ({name}): use an earlier checkpoint")


def holds_own_model(folder: Path) -> bool:
    """Whether a folder holds a model of this library, by its config.json."""
    return _model_type(folder) in _KINDS


def _model_type(folder: Path) -> Any:
    """The model_type in the config.json of a model folder; an error if it is no such folder."""
    if not folder.exists():
        raise FileNotFoundError(f"there is no model folder {folder}")
    if folder.suffix == ".safetensors":
        raise ValueError(f"{folder} is a file of weights: give the folder that holds it and its config.json")
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        merge = "; `prism export RUN --merge` writes that model and a LoRA adapter as one"
        raise ValueError(
            f"{folder} holds an adapter, not a model: give the model that it was trained on"
            + ("" if read_json(adapter).get("peft_type") == "PRISM" else merge)
        )
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} does not open as a model: it has no config.json")
    return read_json(config).get("model_type")


def check_kind(kind: type[PreTrainedModel], folder: Path) -> None:
    """Raise an error unless a folder's config.json is of a model of this kind."""
    wanted = kind.config_class.model_type  # type: ignore[union-attr]  # both of our models have one
    found = _model_type(folder)
    if found != wanted:
        raise ValueError(
            f"{folder} holds no {_KINDS[wanted]}: model_type in its config.json is {found!r}, not {wanted!r}"
            + (f"; it is a {_KINDS[found]}" if found in _KINDS else "")
            + ("; `prism convert` may turn it into one" if found and found not in _KINDS else "")
        )


def _load(kind: Any, folder: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    try:
        with without_progress_bars():
            loaded: tuple[Any, dict[str, Any]] = kind.from_pretrained(  # a pair, with loading info
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
    except (OSError, RuntimeError, SafetensorError) as error:  # only the first line of transformers' long message
        raise ValueError(f"{folder} does not open as a model: {str(error).strip().splitlines()[0]}") from error
    return loaded


def is_run(folder: Path) -> bool:
    """Whether a folder is a training run, not an exported model: its config.json holds settings."""
    config = folder / "config.json"
    return config.is_file() and "settings" in read_json(config)
