"""The HTML report of `prism demo`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from prism.files import write_atomically
from prism.lab import page
from prism.lab.charts import Series, line_chart, percent
from prism.lab.results import recall_curve


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
    """Write the report as one self-contained HTML file.

    Args:
        models: in the order in which they are shown.
        recall: results of the recall probe, as `recall_results` (cli/probe_mqar.py) makes them.
        text: description of the training text.
        seconds: duration of the whole demo.
    """
    body = [
        page.header(
            "PRISM demo",
            "Three memories of fixed size, side by side",
            finding(models, recall),
            _circumstances(machine, seconds, seed),
        ),
        page.tiles(
            [(m["name"], f"{_validation(m):.3f}", f"bits per byte · {_speed(m):,.0f} tokens/s") for m in models]
        ),
        page.paragraph(_summary(models, text)),
        page.commands(command),
        *_language(models, seed),
        *_samples(models, prompt),
        *_recall(recall, recall_command),
        *_reading(models),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.page("PRISM: demo report", body))
    return path


def finding(models: Sequence[TrainedModel], recall: Sequence[dict[str, Any]]) -> str:
    """The result in one sentence: which model predicts the text best, and which recalls most with little memory."""
    first, *others = sorted(models, key=_validation)
    rest = ", ".join(f"{model['name']} {_validation(model):.3f}" for model in others)
    setting = recall[-1]["setting"]
    accuracy = _accuracy(recall)
    names = sorted({r["name"] for r in recall}, key=lambda name: -accuracy[name, setting])
    most, *fewer = names
    answers = ", ".join(f"{name} {accuracy[name, setting]:.0%}" for name in fewer)
    return (
        f"In this run {first['name']} predicts held-out text best: {_validation(first):.3f} bits per byte ({rest}). "
        f"{most} recalls most: {accuracy[most, setting]:.0%} of the answers in the {setting} setting ({answers})."
    )


def _summary(models: Sequence[TrainedModel], text: str) -> str:
    names = ", ".join(model["name"] for model in models)
    return (
        f"{names}: the same small language model with three rules for its memory, trained on {text}. Then the memories "
        "alone, on a pure memory task: associative recall."
    )


def _circumstances(machine: dict[str, Any], seconds: float, seed: int) -> str:
    return (
        f"{seconds:.0f} seconds in all on {machine['cpu']} ({machine['cores']} cores), Python {machine['python']}, "
        f"torch {machine['torch']}. Seed {seed} everywhere, a fixed number of steps."
    )


def _language(models: Sequence[TrainedModel], seed: int) -> list[str]:
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
    x = "tokens of training text"
    columns = ("model", "bits per byte", "training loss", "tokens/s", "parameters", "state bytes")
    return [
        page.heading("Language"),
        page.figure(
            [
                line_chart("Training loss", _curves(models, "loss"), x=x, x_from=0, y="nats per token"),
                line_chart(
                    "Held-out text", _curves(models, "validation_bits_per_byte"), x=x, x_from=0, y="bits per byte"
                ),
            ],
            f"Training loss, and bits per byte on held-out text. {models[0]['steps']} steps, {tokens:,} tokens each, "
            f"seed {seed}, the same samples in the same order.",
            [model["name"] for model in models],
        ),
        page.table(columns, rows, lambda i, j: j == 1 and i == lowest),
        page.paragraph(
            "Bits per byte: on held-out text after the last step, lower is better. Training loss: nats per token at the last "
            "logged step. Tokens/s: training on one core, median over the run. State bytes: everything the model "
            "remembers of a text while it writes, for a text of any length.",
            quiet=True,
        ),
        page.commands(*(model["command"] for model in models)),
    ]


def _samples(models: Sequence[TrainedModel], prompt: str) -> list[str]:
    return [
        page.heading("Samples"),
        page.paragraph(
            f"What each model writes after {prompt!r}. After so little training the models have learned what the text looks "
            "like, hardly what it means."
        ),
        page.columns([page.excerpt(model["name"], prompt, model["sample"]) for model in models], narrow=True),
        page.commands(*(model["sample_command"] for model in models)),
    ]


def _recall(results: Sequence[dict[str, Any]], command: str) -> list[str]:
    settings = list(dict.fromkeys(r["setting"] for r in results))
    names = list(dict.fromkeys(r["name"] for r in results))
    seeds = sorted({r["seed"] for r in results})
    columns = ["rule", *(f"{name}: {_pairs(results, name)} pairs" for name in settings)]
    accuracy = _accuracy(results)
    rows = [[name, *(f"{accuracy[name, setting]:.1%}" for setting in settings)] for name in names]
    highest = {setting: max(accuracy[name, setting] for name in names) for setting in settings}
    sizes = ", ".join(
        f"{next(r['state_size'] for r in results if r['setting'] == setting):,} numbers ({setting})"
        for setting in settings
    )
    return [
        page.heading("Recall"),
        page.paragraph(
            "A sequence shows pairs of a key and a value, then asks for the values of keys it has shown. The answers are only "
            f"in the memory, which has the same size for every rule: {sizes}. In the setting starved there are more pairs "
            "than a key has dimensions, so not all of them can be kept apart."
        ),
        page.figure(
            [_recall_chart(results, setting, names) for setting in settings],
            f"Fraction of questions answered right by the number of pairs. Seed{'s' if len(seeds) > 1 else ''} "
            f"{', '.join(map(str, seeds))}; {_steps(results)} training steps.",
            names,
        ),
        page.table(
            columns, rows, lambda i, j: j > 0 and accuracy[names[i], settings[j - 1]] == highest[settings[j - 1]]
        ),
        page.commands(command),
    ]


def _reading(models: Sequence[TrainedModel]) -> list[str]:
    tokens = models[0]["steps"] * models[0]["tokens_per_step"]
    return [
        page.heading("How to read this"),
        page.paragraph(
            f"This is a demonstration, not a comparison: one seed, models of under {_round_up(models)} parameters, {tokens:,} "
            "tokens of training (real models see thousands of times as many). It shows that all three rules train in the "
            "same loop, how fast they do so on this machine, and what a memory of a given size can recall. It does not show "
            "which rule makes the better language model: one seed decides nothing about small differences in bits per byte. "
            "Every model was trained on one core while others trained on the other cores; anything else that kept the "
            "machine busy shows in the tokens per second, and only there."
        ),
    ]


def _curves(models: Sequence[TrainedModel], key: str) -> list[Series]:
    return [
        Series(m["name"], [(r["step"] * m["tokens_per_step"], r[key]) for r in m["log"] if r.get(key) is not None])
        for m in models
    ]


def _recall_chart(results: Sequence[dict[str, Any]], setting: str, names: Sequence[str]) -> str:
    chosen = [r for r in results if r["setting"] == setting]
    curves = [(name, recall_curve(chosen, name)) for name in names]
    series = [
        Series(name, [(pairs, mean) for pairs, mean, *_ in curve], [(low, high) for *_, low, high in curve])
        for name, curve in curves
    ]
    title = f"{setting.capitalize()}: {chosen[0]['state_size']:,} numbers of memory"
    return line_chart(title, series, x="pairs to remember", y="answered right", y_limits=(0, 1), y_format=percent)


def _accuracy(results: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The mean over the seeds, by name and setting."""
    found: dict[tuple[str, str], list[float]] = {}
    for r in results:
        found.setdefault((r["name"], r["setting"]), []).append(r["accuracy"])
    return {key: statistics.mean(values) for key, values in found.items()}


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
