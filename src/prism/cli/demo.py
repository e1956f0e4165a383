"""`prism demo`: three small language models and their memories, trained here and now, in one report."""

from __future__ import annotations

import io
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from prism.cli.probe import mqar
from prism.data.files import read_json, remove_folder
from prism.evaluate.demo import TrainedModel, write_report
from prism.evaluate.generate import Sampling, Session
from prism.evaluate.language_model import open_model
from prism.evaluate.plots import pyplot
from prism.evaluate.report import machine, write_results
from prism.train.command import command_line
from prism.train.log import read_log
from prism.train.loop import train
from prism.train.overrides import override
from prism.train.presets import preset
from prism.train.run import stored_settings
from prism.train.settings import Settings

MODELS = {"PRISM, L = 2": "prism", "Gated DeltaNet": "gated_delta", "linear attention": "linear"}
RECALL_RULES = ("prism:steps=2", "gated_delta", "linear")
"""The same, in the same order, so that colours in the report agree."""
TEXT = "the source text of this machine's Python standard library"
SEED = 0
VALIDATIONS = 5
RESERVE = 20
"""Seconds for samples and the report."""


def demo(
    output: Path = Path("runs/demo"),
    minutes: float = 5.0,
    steps: int | None = None,
    recall_steps: int | None = None,
    prompt: str = "def ",
) -> None:
    """Train PRISM, Gated DeltaNet and linear attention on recall and on text, and write a report that shows both.

    Args:
        output: folder for report.html, the models and the figures as JSON; an earlier demo's are replaced.
        minutes: what all of it may take on an idle machine; the language models get what the recall probe leaves.
        steps: training steps of each language model; None: as many as fit into `minutes`, equally many for each.
        recall_steps: training steps of the recall probe, instead of its own.
        prompt: what the samples start with.
    """
    started = time.perf_counter()
    pyplot()  # a missing plotting library should be known now, not after the training
    print("1. associative recall")
    mqar(RECALL_RULES, steps=recall_steps, output=output / "recall")
    print(f"2. language models on {TEXT}")
    runs = {name: output / rule for name, rule in MODELS.items()}
    for folder in runs.values():
        if stored_settings(folder) is not None:
            remove_folder(folder)
    if steps is None:
        left = 60 * minutes - RESERVE - (time.perf_counter() - started)
        steps = _affordable([_settings(rule, 1, runs[name]) for name, rule in MODELS.items()], left)
    models = []
    for name, rule in MODELS.items():
        print(f"{name}: {steps} steps", flush=True)
        models.append(_train(name, _settings(rule, steps, runs[name]), prompt))
    print("3. report")
    recall = read_json(output / "recall" / "results.json")
    command, seconds = shlex.join(["prism", *sys.argv[1:]]), time.perf_counter() - started
    write_results(output / "results.json", {"models": models, "recall": recall["results"]}, command=command)
    report = write_report(
        output / "report.html",
        models,
        recall["results"],
        recall_command=_command(
            f"probe mqar --rules {' '.join(RECALL_RULES)}", steps=recall_steps, output=output / "recall"
        ),
        command=command,
        prompt=prompt,
        text=TEXT,
        seed=SEED,
        machine=machine(),
        seconds=seconds,
    )
    print(f"done in {seconds:.0f} s; the report: {report.resolve()}")


def _settings(rule: str, steps: int, out: Path) -> Settings:
    values: dict[str, Any] = {
        "out": str(out),
        "steps": steps,
        "seed": SEED,
        "model": {"layers": rule, "num_hidden_layers": 2},
        "data": {"context": 128},
        "optimizer": {"lr": 4e-3},
        "schedule": {"warmup": max(1, steps // 10)},
        "validation": {"every": max(1, steps // VALIDATIONS)},
        "checkpoint": {"every": 0},
        "log": {"every": max(1, steps // 60)},
    }
    return override(preset("tiny"), values, "demo")


def _affordable(settings: list[Settings], seconds: float, trial: int = 6, least: int = 40) -> int:
    """How many steps each of these can take if all are to be trained in so many seconds, judged by a few steps of each."""
    step = 0.0
    for each in settings:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            quick = {"out": f"{folder}/run", "steps": trial, "log": {"every": 1}, "validation": {"sequences": 1}}
            train(override(each, quick, "trial"))
            speeds = [r["tokens_per_second"] for r in read_log(Path(folder) / "run" / "log.jsonl") if "loss" in r]
        step += each.batch.sequences * each.data.context / statistics.median(speeds[1:])
    each = settings[0]
    # A validation takes no backward pass, which is two thirds of a step.
    validating = VALIDATIONS * each.validation.sequences / each.batch.sequences / 3
    return max(least, int(seconds / step - validating))


def _train(name: str, settings: Settings, prompt: str) -> TrainedModel:
    outcome = train(settings)
    if outcome.model is None:
        raise KeyboardInterrupt
    lm = open_model(outcome.model, "cpu")
    sampling = Sampling(temperature=0.7)
    session = Session(lm, SEED)
    session.read(prompt)
    sample = "".join(session.write(300, sampling)) + session.text.flush()
    return TrainedModel(
        name=name,
        command=command_line(settings),
        log=read_log(settings.out / "log.jsonl"),
        steps=settings.steps,
        tokens_per_step=settings.batch.sequences * settings.data.context,
        parameters=sum(parameter.numel() for parameter in lm.model.parameters()),
        state_bytes=session.nbytes,
        sample=sample,
        sample_command=_command(
            f"generate {shlex.quote(str(outcome.model))}",
            prompt=prompt,
            max_new_tokens=300,
            temperature=sampling.temperature,
            seed=SEED,
        ),
    )


def _command(words: str, **flags: Any) -> str:
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items() if value is not None]
    return " ".join(["prism", words, *(f"{flag} {shlex.quote(value)}" for flag, value in given)])
