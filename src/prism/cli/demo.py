"""`prism demo`: train three small language models and a recall probe, and write one report on them."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.cli.probe_mqar import mqar, recall_results
from prism.files import check_target, read_json, remove_folder
from prism.lab.demo import TrainedModel, write_report
from prism.lab.grid import RESULTS, Records
from prism.lab.jobs import run_jobs
from prism.lab.results import machine, pyplot, write_results
from prism.language.generate import Sampling, Session, open_model
from prism.language.settings import Settings, command_line, preset
from prism.language.task import train_lm
from prism.overrides import override
from prism.train.run import read_log

MODELS = {"PRISM, L = 2": "prism", "Gated DeltaNet": "gated_delta", "linear attention": "linear"}
RECALL_RULES = ("prism:steps=2", "gated_delta", "linear")
"""The same rules in the same order, so that colours in the report agree."""
TEXT = "the source text of this machine's Python standard library"
SEED = 0
VALIDATIONS = 5
MARK = ".demo"
"""Empty file that marks the folder of a demo."""
STEPS_A_MINUTE, LEAST_STEPS = 90, 40
"""Chosen so that the default takes about 5 minutes on 2 idle cores. A measured speed would let load decide the result."""


def demo(
    output: Path = Path("runs/demo"),
    minutes: float = 5.0,
    steps: int | None = None,
    recall_steps: int | None = None,
    prompt: str = "def ",
) -> int:
    """Train PRISM, Gated DeltaNet and linear attention on recall and on text, and write a report on both.

    Args:
        output: folder for report.html, the models and the results as JSON; those of an earlier demo are replaced.
        minutes: approximate duration on 2 idle cores. It only sets `steps`.
            The same value gives the same models on any machine of the same type, busy or not.
        steps: training steps of each language model. None: 90 per minute, at least 40.
        recall_steps: training steps of the recall probe. None: its default.
        prompt: text that the samples start with.
    """
    started = time.perf_counter()
    if minutes <= 0:
        raise ValueError(f"minutes must be above 0, got {minutes:g}")
    steps = steps_for(minutes) if steps is None else steps
    pyplot()  # fail now, not after the training, if matplotlib is missing
    runs = {name: output / rule for name, rule in MODELS.items()}
    _check_output(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARK).touch()
    for folder in (output / "recall", *runs.values()):
        if folder.is_dir():
            remove_folder(folder)
    print("1. associative recall")
    if failed := mqar(RECALL_RULES, seeds=1, steps=recall_steps, device="cpu", output=output / "recall"):
        return failed
    recall = recall_results(Records(output / "recall" / RESULTS).lines.values())
    print(f"2. language models on {TEXT}, {steps} steps each")
    jobs = [_Job(name, _settings(rule, steps, runs[name]), prompt) for name, rule in MODELS.items()]
    models = run_jobs(_train, jobs, list(MODELS), [steps] * len(jobs))
    print("3. report")
    command, seconds = shlex.join(["prism", *sys.argv[1:]]), time.perf_counter() - started
    write_results(output / "results.json", {"models": models, "recall": recall}, command=command)
    report = write_report(
        output / "report.html",
        models,
        recall,
        recall_command=_command(
            f"probe mqar --seeds 1 --device cpu --rules {' '.join(RECALL_RULES)}",
            steps=recall_steps,
            output=output / "recall",
        ),
        command=command,
        prompt=prompt,
        text=TEXT,
        seed=SEED,
        machine=machine(),
        seconds=seconds,
    )
    print(f"done in {seconds:.0f} s; the report: {report.resolve()}")
    return 0


def steps_for(minutes: float) -> int:
    """Training steps of each language model; depends on `minutes` alone."""
    return max(LEAST_STEPS, round(STEPS_A_MINUTE * minutes))


def _check_output(output: Path) -> None:
    """Refuse to replace anything but an earlier demo, complete or not: its folder has a mark."""
    if not check_target(output, folder=True).exists() or (output / MARK).exists() or _is_demo(output / "results.json"):
        return
    foreign = [path.name for path in output.iterdir() if not path.name.startswith(".")]
    if foreign:
        raise ValueError(
            f"{output} holds files that no demo wrote ({', '.join(foreign[:3])}): give another folder with --output"
        )


def _is_demo(results: Path) -> bool:
    try:
        return {"models", "recall"} <= set(read_json(results)["results"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class _Job:
    name: str
    settings: Settings
    prompt: str


def _settings(rule: str, steps: int, out: Path) -> Settings:
    values: dict[str, Any] = {
        "out": str(out),
        "steps": steps,
        "seed": SEED,
        "device": "cpu",
        "model": {"layers": rule, "num_hidden_layers": 2},
        "data": {"context": 128},
        "optimizer": {"lr": 4e-3},
        "schedule": {"warmup": max(1, steps // 10)},
        "validation": {"every": max(1, steps // VALIDATIONS)},
        "checkpoint": {"every": 0},
        "log": {"every": max(1, steps // 60)},
    }
    return override(preset("tiny"), values, "demo")


def _train(job: _Job, report: Callable[[int, float], None]) -> TrainedModel:
    """Train one model and sample from it, in a separate process on one core: small models gain little from more cores."""
    settings, prompt = job.settings, job.prompt
    outcome = train_lm(settings, report=report)
    if outcome.model is None:
        raise KeyboardInterrupt
    lm = open_model(outcome.model, "cpu")
    sampling = Sampling(temperature=0.7)
    session = Session(lm, SEED)
    session.read(prompt)
    sample = "".join(session.write(300, sampling)) + session.text.flush()
    return TrainedModel(
        name=job.name,
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
