"""What the demo's report says, from the results of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypedDict

from prism.data.files import write_atomically
from prism.evaluate import page
from prism.evaluate.plots import recall_picture, training_picture


class TrainedModel(TypedDict):
    """One language model of the demo."""

    name: str
    command: str
    log: list[dict[str, Any]]
    """The records of log.jsonl."""
    steps: int
    tokens_per_step: int
    parameters: int
    state_bytes: int
    sample: str
    sample_command: str


def write_report(
    path: Path,
    models: Sequence[TrainedModel],
    recall: Sequence[dict[str, Any]],
    *,
    recall_command: str,
    command: str,
    prompt: str,
    text: str,
    seed: int,
    machine: dict[str, Any],
    seconds: float,
) -> Path:
    """One HTML file that holds everything it shows.

    Args:
        models: in the order in which they are shown.
        recall: results of the recall probe, as `prism probe mqar` writes them.
        text: what the models were trained on, in words.
        seconds: that the whole demo took.
    """
    body = [
        page.heading("Three memories of fixed size, side by side", 1),
        page.paragraph(_summary(models, recall, text)),
        page.paragraph(_circumstances(machine, seconds, seed), quiet=True),
        page.commands(command),
        *_language(models, text, seed),
        *_samples(models, prompt),
        *_recall(recall, recall_command),
        *_reading(models),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.page("PRISM: demo report", body))
    return path


def _summary(models: Sequence[TrainedModel], recall: Sequence[dict[str, Any]], text: str) -> str:
    names = ", ".join(model["name"] for model in models)
    return (
        f"{names}: the same small language model, in which only the rule of the memory differs, trained on {text}. And "
        "the memories alone, on a task that asks for nothing but remembering: associative recall."
    )


def _circumstances(machine: dict[str, Any], seconds: float, seed: int) -> str:
    return (
        f"{seconds:.0f} seconds in all on {machine['cpu']} ({machine['cores']} cores), Python {machine['python']}, "
        f"torch {machine['torch']}. Seed {seed} everywhere. The command:"
    )


def _language(models: Sequence[TrainedModel], text: str, seed: int) -> list[str]:
    tokens = models[0]["steps"] * models[0]["tokens_per_step"]
    rows = [
        [
            model["name"],
            f"{_validation(model):.3f}",
            f"{_last(model['log'], 'loss'):.3f}",
            f"{_speed(model):,.0f}",
            f"{model['parameters']:,}",
            f"{model['state_bytes']:,}",
        ]
        for model in models
    ]
    lowest = min(range(len(models)), key=lambda i: _validation(models[i]))
    columns = ("model", "bits per byte", "training loss", "tokens/s", "parameters", "state bytes")
    return [
        page.heading("Language"),
        page.figure(
            partial(training_picture, models),
            f"Loss while training, and bits per byte on text held out. {models[0]['steps']} steps, {tokens:,} tokens each, "
            f"seed {seed}, the same samples in the same order.",
        ),
        page.table(columns, rows, lambda i, j: j == 1 and i == lowest),
        page.paragraph(
            "Bits per byte: on held-out text after the last step, lower is better. Training loss: nats per token of the last "
            "step logged. Tokens/s: of training on one core, the median over the run. State bytes: all that the model "
            "remembers of a text while it writes, whatever the text's length.",
            quiet=True,
        ),
        page.commands(*(model["command"] for model in models)),
    ]


def _samples(models: Sequence[TrainedModel], prompt: str) -> list[str]:
    parts = [
        page.heading("Samples"),
        page.paragraph(
            f"What each model writes after {prompt!r}. After so little training it is the look of the text that they have "
            "learned, hardly its sense."
        ),
    ]
    for model in models:
        shown = f"<pre><b>{escape(prompt)}</b>{escape(model['sample'])}</pre>"
        parts += [page.heading(model["name"], 3), shown, page.commands(model["sample_command"])]
    return parts


def _recall(results: Sequence[dict[str, Any]], command: str) -> list[str]:
    settings = list(dict.fromkeys(r["setting"] for r in results))
    names = list(dict.fromkeys(r["name"] for r in results))
    seeds = sorted({r["seed"] for r in results})
    columns = ["rule", *(f"{name}: {_pairs(results, name)} pairs" for name in settings)]
    accuracy = {(r["name"], r["setting"]): [] for r in results}  # type: dict[tuple[str, str], list[float]]
    for r in results:
        accuracy[r["name"], r["setting"]].append(r["accuracy"])
    rows = [[name, *(f"{statistics.mean(accuracy[name, setting]):.1%}" for setting in settings)] for name in names]
    sizes = ", ".join(
        f"{next(r['state_size'] for r in results if r['setting'] == setting):,} numbers ({setting})"
        for setting in settings
    )
    return [
        page.heading("Recall"),
        page.paragraph(
            "A sequence shows pairs of a key and a value, then asks for the values of keys it has shown. The answers are "
            f"nowhere but in the memory, and the memory has the same size for every rule: {sizes}. In the setting called "
            "starved there are more pairs than a key has dimensions, so not everything can be kept apart."
        ),
        page.figure(
            partial(recall_picture, results),
            f"Share of questions answered right by the number of pairs. Seed{'s' if len(seeds) > 1 else ''} "
            f"{', '.join(map(str, seeds))}; {_steps(results)} training steps.",
        ),
        page.table(columns, rows),
        page.commands(command),
    ]


def _reading(models: Sequence[TrainedModel]) -> list[str]:
    tokens = models[0]["steps"] * models[0]["tokens_per_step"]
    return [
        page.heading("How to read this"),
        page.paragraph(
            f"This is a demonstration, not a comparison: one seed, models of under {_round_up(models)} parameters, {tokens:,} "
            "tokens of training (real ones see thousands of times as many). It shows that all three rules train in the same "
            "loop, how fast they do on this machine, and what a memory of a given size can recall. It does not show which "
            "rule makes the better language model: one seed decides nothing about small differences in bits per byte. Every "
            "model was trained on one core, with others at work on the other cores; whatever else kept the machine busy "
            "shows in the tokens per second."
        ),
    ]


def _validation(model: TrainedModel) -> float:
    return _last(model["log"], "validation_bits_per_byte")


def _last(log: Sequence[dict[str, Any]], key: str) -> float:
    return float([record[key] for record in log if record.get(key) is not None][-1])


def _speed(model: TrainedModel) -> float:
    return statistics.median(r["tokens_per_second"] for r in model["log"] if "tokens_per_second" in r)


def _round_up(models: Sequence[TrainedModel]) -> str:
    largest = max(model["parameters"] for model in models)
    return f"{-(-largest // 1_000_000)} million"


def _pairs(results: Sequence[dict[str, Any]], setting: str) -> int:
    return int(next(r["task"]["pairs"] for r in results if r["setting"] == setting))


def _steps(results: Sequence[dict[str, Any]]) -> str:
    return " and ".join(str(steps) for steps in dict.fromkeys(r["steps"] for r in results))
