"""Export an adapter in the format of peft: adapter_config.json, adapter_model.safetensors and a model card."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from prism.files import read_json
from prism.language.adapt_settings import AdaptSettings, command_line
from prism.language.export import validation_text
from prism.train import tensors
from prism.train.checkpoint import Checkpoint
from prism.train.export import TrainedRun, model_card

ADAPTER = "default"
"""The name under which an adapter is trained; peft's own default."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
DIGEST = "base_sha256"
"""Entry of the weights' metadata: the hash of the base (adapted.py)."""


def config_bytes(wrapped: Any, base: Path) -> bytes:
    """The adapter_config.json of a model with an adapter, as `save_pretrained` writes it."""
    config = replace(wrapped.peft_config[ADAPTER], inference_mode=True, base_model_name_or_path=str(base))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return (Path(folder) / CONFIG).read_bytes()


def write_adapter(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the adapter of a run's checkpoint into an empty folder, in the format of peft."""
    from prism.adapters import PrismTuner

    trained = TrainedRun.open(run, checkpoint, "adapt", AdaptSettings())
    weights = tensors.read(checkpoint.tensors)
    named = {PrismTuner._remove_adapter_name_from_key(name, ADAPTER): value for name, value in weights.items()}
    about = {"format": "pt", DIGEST: trained.config["identity"]["base"]}
    (folder / WEIGHTS).write_bytes(save(named, about))
    (folder / CONFIG).write_bytes((run / CONFIG).read_bytes())
    base = read_json(run / CONFIG)["base_model_name_or_path"]
    card = _card(trained, base, sum(value.numel() for value in named.values()))
    (folder / "README.md").write_text(card, encoding="utf-8")


_METADATA = """\
library_name: peft
license: other
pipeline_tag: text-generation
tags:
- prism
- adapter"""
_LIMITS = """\
The adapter works with the base that it was trained on, and with no other. It cannot be merged into the base's weights.
Its output needs checking."""


def _card(trained: TrainedRun[AdaptSettings], base: str, parameters: int) -> str:
    """The README.md: the base, the training data, scores and use."""
    settings, state = trained.settings, trained.checkpoint.state
    data, adapter = trained.config["training_data"], settings.adapter
    seen = state["step"] * settings.batch.sequences * settings.data.context
    return model_card(
        trained.name,
        _METADATA,
        f"A PRISM adapter of {parameters:,} parameters for the model `{base}`: {adapter.steps} writes per token,\n"
        f"rank {adapter.rank}.",
        {
            "data": f"{', '.join(settings.data.sources)}: {data['tokens']:,} tokens, {data['text_bytes']:,} bytes of text",
            "seen": f"{seen:,} tokens in {state['step']:,} steps of {settings.batch.sequences} × {settings.data.context}",
        },
        settings,
        state,
        trained.records,
        command_line(settings),
        validation_text(trained.records),
        _use(base),
        _LIMITS,
    )


def _use(base: str) -> str:
    """Python code that loads base and adapter."""
    return f"""\
import prism.adapters  # registers the type of the adapter with peft
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})
model = PeftModel.from_pretrained(base, "path/to/this/folder")"""
