"""The files of an adapter in the format of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from prism.files import read_json
from prism.train import tensors
from prism.train.checkpoint import Checkpoint

ADAPTER = "default"
"""The name under which an adapter is trained; peft's own default."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
DIGEST = "base_sha256"
"""Entry of the weights' metadata: the hash of the base (adapted.py)."""
_WRAPPER = "base_model.model."
"""What a `PeftModel` puts before the names of the model inside."""


def config_bytes(wrapped: Any, base: Path) -> bytes:
    """The adapter_config.json of a model with an adapter, as `save_pretrained` writes it."""
    config = replace(wrapped.peft_config[ADAPTER], inference_mode=True, base_model_name_or_path=str(base))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return (Path(folder) / CONFIG).read_bytes()


def write_adapter_files(run: Path, checkpoint: Checkpoint, digest: str, folder: Path) -> int:
    """Write the adapter of a run's checkpoint into a folder, as peft would; returns its number of parameters.

    The run folder has its adapter_config.json: the base is not needed.

    Args:
        digest: the hash of the base.
    """
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    import prism.hf.adapters  # noqa: F401  (registers the type)

    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(read_json(run / CONFIG)["peft_type"])]
    weights = {_WRAPPER + name: value for name, value in tensors.read(checkpoint.tensors).items()}
    named = {tuner._remove_adapter_name_from_key(name, ADAPTER): value for name, value in weights.items()}
    (folder / WEIGHTS).write_bytes(save(named, {"format": "pt", DIGEST: digest}))
    (folder / CONFIG).write_bytes((run / CONFIG).read_bytes())
    return sum(value.numel() for value in named.values())
