"""Export an adapter in the format of peft: adapter_config.json, adapter_model.safetensors and a model card."""

from __future__ import annotations

from pathlib import Path

from prism.files import read_json
from prism.language.adapt_settings import AdaptSettings, command_line
from prism.language.adapter_files import CONFIG, write_adapter_files
from prism.language.cards import adapter_use, metadata, validation_text
from prism.train.checkpoint import Checkpoint
from prism.train.export import TrainedRun, model_card


def write_adapter(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the adapter of a run's checkpoint into an empty folder, in the format of peft."""
    trained = TrainedRun.open(run, checkpoint, "adapt", AdaptSettings())
    parameters = write_adapter_files(run, checkpoint, trained.config["identity"]["base"], folder)
    base = read_json(run / CONFIG)["base_model_name_or_path"]
    (folder / "README.md").write_text(_card(trained, base, parameters), encoding="utf-8")


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
        metadata("peft", "adapter"),
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
        adapter_use(base, "import prism.hf.adapters  # registers the type of the adapter with peft"),
        _LIMITS,
    )
