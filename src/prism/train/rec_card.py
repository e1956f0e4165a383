"""The card that goes beside every recommender: what it is, what it saw, how well it ranks, how to use it."""

from __future__ import annotations

from typing import Any

from prism.language.export import training_loss
from prism.overrides import train_command
from prism.train.rec_presets import preset
from prism.train.rec_settings import RecSettings


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
