"""The card that goes beside every recommender: what it is, what it saw, how well it ranks, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prism.files import json_bytes
from prism.models.loading import without_progress_bars
from prism.models.losses import full_softmax
from prism.overrides import train_command
from prism.recommend.events import Catalogue
from prism.recommend.events.dataset import ITEMS, TRAINING, USERS
from prism.recommend.learner import Learner, build_recommender
from prism.recommend.settings import RecSettings, preset
from prism.train import tensors
from prism.train.checkpoint import Checkpoint
from prism.train.distributed import World
from prism.train.run import read_log, stored_config, stored_settings, training_loss


def model_card(
    name: str,
    settings: RecSettings,
    training_data: dict[str, Any],
    state: dict[str, Any],
    records: list[dict[str, Any]],
    parameters: int,
) -> str:
    model, data, seen = settings.model, settings.data, training_data
    loss: str = settings.loss.name
    if loss != "full_softmax":
        loss += f", {settings.loss.count} {settings.loss.negatives} negatives"
    epochs = state["step"] * settings.batch.sequences / seen["samples"]
    return f"""---
library_name: prism
license: other
tags:
- prism
- recommendation
---

# {name}

A recommender of {parameters:,} parameters for {seen["items"]:,} items: {model.num_hidden_layers} layers of
`{model.layers}`, width {model.hidden_size}, {model.num_heads} heads, trained from {model.weights or "random weights"}.

## Training

| | |
|---|---|
| data | {data.source or "the synthetic log"}: {seen["events"]:,} events of {seen["users"]:,} users |
| split | {_split(seen)} |
| seen | {state["step"]:,} steps of {settings.batch.sequences} samples of at most {data.length} events: {epochs:.1f} epochs |
| loss | {loss} |
| optimiser | {settings.optimizer.name}, learning rate {settings.optimizer.lr:g}, {settings.schedule.name} |
| training loss | {training_loss(records)} |
| skipped steps | {state["skipped"]} |
| seed | {settings.seed} |

```sh
{train_command("rec", settings, preset(settings.preset))}
```

## Evaluation

{_validation(settings, records)}

## Use

```python
from prism import Recommender

recommender = Recommender.load("path/to/this/folder")
print(recommender.recommend(sequences=[["an item", "another"]], k=10))
```

## Limits

The model ranks the items of its log, for tastes like those in it, and what is popular there is popular here.

## Licence

The code that made the model is Apache-2.0. What may be done with the weights depends on the data they were trained on.
"""


def _split(seen: dict[str, Any]) -> str:
    held_out = f"{seen['validation_targets']:,} to validate, {seen['test_targets']:,} to test"
    return f"{seen['split']}: {seen['train_events']:,} events to learn from, {held_out}"


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
        f"Held-out validation events after step {last['step']:,}, all items ranked, items a user has had {seen}, at most "
        f"{settings.data.length} events of a history read: {figures}. These chose the model; a test is another matter."
    )


# A recommender's checkpoint as a folder that serves: config.json, model.safetensors, items.json, users.json,
# README.md,
# and training.json, which says what it was trained on and how that was split.


def write_model(run: Path, checkpoint: Checkpoint, folder: Path) -> None:
    settings, stored = stored_settings(run, "rec", RecSettings()), stored_config(run)
    assert settings is not None and stored is not None
    learner = Learner(build_recommender(settings, Catalogue.load(run / ITEMS)), full_softmax)
    tensors.load(checkpoint.tensors, learner, None, World(torch.device("cpu")))
    with without_progress_bars():
        learner.recommender.save_pretrained(folder)
    for name in (ITEMS, USERS):
        (folder / name).write_bytes((run / name).read_bytes())
    state = checkpoint.state
    trained = {key: stored[key] for key in ("settings", "training_data")}
    (folder / TRAINING).write_bytes(json_bytes({**trained, "step": state["step"]}))
    records = [record for record in read_log(run / "log.jsonl") if record["step"] <= state["step"]]
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    card = model_card(run.resolve().name, settings, stored["training_data"], state, records, parameters)
    (folder / "README.md").write_text(card, encoding="utf-8")
