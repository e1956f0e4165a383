"""Export a recommender as a model folder that can serve.

The folder holds config.json, model.safetensors, items.json, users.json, a model card, and training.json: the settings and
the data it was trained on, and how that was split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism.files import json_bytes
from prism.models.loading import without_progress_bars
from prism.overrides import train_command
from prism.recommend.events import Catalogue, Users
from prism.recommend.events.dataset import ITEMS, TRAINING, USERS
from prism.recommend.learner import Learner, build_recommender
from prism.recommend.losses import full_softmax
from prism.recommend.settings import RecSettings, preset
from prism.train import export
from prism.train.checkpoint import Checkpoint
from prism.train.export import TrainedRun

_METADATA = """\
library_name: prism
license: other
tags:
- prism
- recommendation"""
_USE = """\
from prism import Recommender

recommender = Recommender.load("path/to/this/folder")
print(recommender.recommend(sequences=[["an item", "another"]], k=10))"""
_LIMITS = """\
The model ranks the items of its training events, for users like those in them, and favours what was popular there."""


def write_model(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the model of a run's checkpoint into an empty folder."""
    trained = TrainedRun.open(run, checkpoint, "rec", RecSettings())
    settings, state = trained.settings, checkpoint.state
    learner = Learner(build_recommender(settings, Catalogue.load(run / ITEMS), Users.load(run / USERS)), full_softmax)
    parameters = trained.load(learner)
    with without_progress_bars():
        learner.recommender.save_pretrained(folder)
    for name in (ITEMS, USERS):
        (folder / name).write_bytes((run / name).read_bytes())
    stored = {key: trained.config[key] for key in ("settings", "training_data")}
    (folder / TRAINING).write_bytes(json_bytes({**stored, "step": state["step"]}))
    card = model_card(trained.name, settings, stored["training_data"], state, trained.records, parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(
    name: str,
    settings: RecSettings,
    training_data: dict[str, Any],
    state: dict[str, Any],
    records: list[dict[str, Any]],
    parameters: int,
) -> str:
    """The README.md: what the model is, its training data, its scores and how to use it."""
    model, data, seen = settings.model, settings.data, training_data
    loss: str = settings.loss.name
    if loss != "full_softmax":
        loss += f", {settings.loss.count} {settings.loss.negatives} negatives"
    epochs = state["step"] * settings.batch.sequences / seen["samples"]
    samples = f"{settings.batch.sequences} samples of at most {data.length} events"
    return export.model_card(
        name,
        _METADATA,
        f"A recommender of {parameters:,} parameters for {seen['items']:,} items: {model.num_hidden_layers} layers of\n"
        f"`{model.layers}`, width {model.hidden_size}, {model.num_heads} heads, "
        f"trained from {model.weights or 'random weights'}.",
        {
            "data": f"{data.source or 'synthetic events'}: {seen['events']:,} events of {seen['users']:,} users",
            "split": _split(seen),
            "seen": f"{state['step']:,} steps of {samples}: {epochs:.1f} epochs",
            "loss": loss,
        },
        settings,
        state,
        records,
        train_command("rec", settings, preset(settings.preset)),
        _validation(settings, records),
        _USE,
        _LIMITS,
    )


def _split(seen: dict[str, Any]) -> str:
    held_out = f"{seen['validation_targets']:,} to validate, {seen['test_targets']:,} to test"
    return f"{seen['split']}: {seen['train_events']:,} events to train on, {held_out}"


def _validation(settings: RecSettings, records: list[dict[str, Any]]) -> str:
    name = f"validation_{settings.validation.metric}"
    scores = [record for record in records if name in record]
    if not scores:
        return "Not validated."
    last = scores[-1]
    figures = ", ".join(
        f"{key.removeprefix('validation_')} {value:.4f}" for key, value in last.items() if key.startswith("validation_")
    )
    seen = "left out" if settings.validation.filter_seen else "ranked too"
    return (
        f"Held-out validation events after step {last['step']:,}, all items ranked, items that the user already had {seen}, "
        f"at most {settings.data.length} events of a history read: {figures}. "
        "The model was selected on these events: they are no test."
    )
