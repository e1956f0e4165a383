"""Which model this is, in two short texts: what a saved state must find unchanged."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedModel

_SAYS_NOTHING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "use_cache",
    "dropout",
    "form",
    "backend",
)
"""Entries of a configuration that do not change what a model computes."""


def config_sha256(model: PreTrainedModel) -> str:
    """What the model is: the same for every model that computes alike, given the same weights."""
    contents = {k: v for k, v in model.config.to_dict().items() if k not in _SAYS_NOTHING}
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def weights_sha256(model: PreTrainedModel) -> str:
    """Of norms, gates and other vectors: little to read, and training moves them all."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            digest.update(name.encode())
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def identity(model: PreTrainedModel) -> dict[str, str]:
    return {"config_sha256": config_sha256(model), "weights_sha256": weights_sha256(model)}


def differs(found: dict[str, str], model: PreTrainedModel) -> str | None:
    """In what the model that left `found` was another one: "another configuration", "other weights", or None."""
    here = identity(model)
    for name, what in (("config_sha256", "another configuration"), ("weights_sha256", "other weights")):
        if found.get(name) != here[name]:
            return what
    return None
