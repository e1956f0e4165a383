"""The kinds of tasks in a plan: synthetic tasks, and language models on text. A kind turns rules into settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from prism import rules as registry
from prism.lab.entries import Budget, PlanSettings
from prism.lab.model import ModelSettings, ProbeModel
from prism.lab.probe import ProbeRun
from prism.lab.tasks.batches import Curriculum
from prism.lab.tasks.catalogue import build_task, task_class
from prism.rules.rule import check_options

TEXT = "text"
"""The name of the task on text."""


class Compared(NamedTuple):
    """A rule of a plan."""

    name: str
    options: dict[str, Any]
    text: dict[str, Any]
    """Fields `model` and `optimizer` of `TextRun` that this rule alone has, for tasks on text."""


class Kind(Protocol):
    """What a plan asks about a task, whichever kind it is."""

    function: str
    """The training, `module:function`; a name of `grid.HOMES` where results know it by another."""
    steps: int
    data: str
    """A hash of the tokens that a model is trained and tested on, if they are read from files; else empty."""

    def settings(self, rule: Compared, key_dim: int, **changed: int) -> dict[str, Any]:
        """Settings of a training. `changed` has another `width` or `hidden` than the budget."""
        ...

    def sizes(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Number of parameters, and state size."""
        ...


def kind_of(table: Mapping[str, Any], settings: PlanSettings) -> Kind:
    """The kind of a task in a plan; refuses wrong options."""
    if table["task"] == TEXT:
        return Text(table, settings)
    task_class(table["task"], [TEXT])
    return Probe(table, settings)


class Probe:
    """A synthetic task."""

    function = "prism.probes.training:probe_job"
    data = ""

    def __init__(self, table: Mapping[str, Any], settings: PlanSettings) -> None:
        budget, curriculum = settings.budget, table.get("curriculum")
        options = dict(table.get("options", {}))
        self.task = build_task(table["task"], options)
        shared = ("batch", "warmup", "weight_decay", "clip", "evaluations", "validation_sequences", "test_sequences")
        self.steps = budget.steps_for(self.task.sample(1, torch.Generator().manual_seed(0)).inputs.shape[1])
        self.run = ProbeRun(
            task=table["task"],
            task_options=options,
            tests=dict(table.get("tests", {})),
            model=ModelSettings(
                layers=budget.layers,
                width=budget.width,
                heads=budget.heads,
                value_dim=value_dim(budget),
                conv_size=budget.conv,
                hidden=budget.hidden,
                positions=budget.positions,
            ),
            steps=self.steps,
            curriculum=None if curriculum is None else Curriculum(**curriculum),
            device=settings.device,
            precision=settings.precision,
            stop_at=budget.stop_at,
            **{name: getattr(budget, name) for name in shared},
        )
        tasks = [*self.run.build_tests().values(), *(task for _, task in self.run.stages())]
        longest = max(task.sample(1, torch.Generator().manual_seed(0)).inputs.shape[1] for task in tasks)
        if 0 < budget.positions < longest:
            raise ValueError(
                f"budget.positions must be at least {longest}, the longest sequence with tests, got {budget.positions}"
            )

    def settings(self, rule: Compared, key_dim: int, **changed: int) -> dict[str, Any]:
        sizes: dict[str, Any] = {"key_dim": key_dim, **changed}
        model = replace(self.run.model, rule=rule.name, options=rule.options, **sizes)
        return asdict(replace(self.run, model=model))

    def sizes(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        with torch.device("meta"):
            model = ProbeModel(self.task, ModelSettings(**settings["model"]))
        return model.parameter_count, model.state_size


INSTEAD = {
    "steps": "budget.steps or budget.tokens",
    "batch": "budget.batch",
    "learning_rate": "learning_rate.values",
    "seed": "seeds",
}
"""Fields of `TextRun` that are no options, and the keys of a plan that give them."""
OF_RULES = ("layers", "rule_options")
"""Arguments of a model that say which rule it has."""
SYNTHETIC = ("positions", "validation_sequences", "test_sequences", "stop_at")
"""Keys of the budget that only synthetic tasks have."""


class Text:
    """A language model on prepared tokens. Options are the fields of `TextRun` (text.py)."""

    function = "prism.compare.text:train_text"

    def __init__(self, table: Mapping[str, Any], settings: PlanSettings) -> None:
        self.text = import_module(f"{__package__}.text")
        self.options = dict(table.get("options", {}))
        self.budget, self.plan = settings.budget, settings
        self._check_keys(table)
        corpus = self.text.open_corpus(Path(self.options["data"]), verify=False)
        self.vocabulary: int = corpus.manifest.vocab_size
        self.data: str = corpus.manifest.digest
        run = self.text.TextRun.of({**self.options, "model": {}, "steps": 1, "learning_rate": 1.0}, "options.")
        self.text.check_contexts(run, corpus)
        self.steps = settings.budget.steps_for(run.context)

    def _check_keys(self, table: Mapping[str, Any]) -> None:
        """Refuse what a task on text has not, or has elsewhere in the plan."""
        for name in ("tests", "curriculum"):
            if name in table:
                raise ValueError(f"{name} is for synthetic tasks, not for {TEXT!r}")
        for name in SYNTHETIC:
            if getattr(self.budget, name) != getattr(Budget, name):
                raise ValueError(
                    f"budget.{name} is for synthetic tasks, not for {TEXT!r}: remove it, or give it to those tasks alone"
                )
        for name, key in INSTEAD.items():
            if name in self.options:
                raise ValueError(f"options.{name} is not an option of {TEXT!r}: use {key}")
        for name in ("model", "optimizer"):
            if not isinstance(self.options.get(name, {}), dict):
                raise ValueError(f"options.{name} must be a table, got {self.options[name]!r}")
        for name in OF_RULES:
            if name in self.options.get("model", {}):
                raise ValueError(
                    f"options.model.{name} would replace every rule of the plan: give it to a rule, as rules.NAME.text.model"
                )
        if "test" in self.options:
            raise ValueError(f"options.test is not an option of {TEXT!r}: final runs are tested, the search is not")
        if not isinstance(self.options.get("data"), str):
            raise ValueError(f"options.data must be a folder of prepared tokens, got {self.options.get('data')!r}")

    def settings(self, rule: Compared, key_dim: int, **changed: int) -> dict[str, Any]:
        budget = replace(self.budget, **changed)  # type: ignore[arg-type]  # width and hidden alone
        check_options(registry.get(rule.name), rule.options)
        sizes = {"key_dim": key_dim, "value_dim": value_dim(self.budget), "conv_size": budget.conv}
        chosen = registry.get(rule.name).with_sizes(sizes, rule.options)
        model = {
            "layers": rule.name,
            "hidden_size": budget.width,
            "num_hidden_layers": budget.layers,
            "num_heads": budget.heads,
            "intermediate_size": budget.hidden,
            "rule_options": {rule.name: chosen},
            **self.options.get("model", {}),
            **rule.text.get("model", {}),
        }
        optimizer = {**self.options.get("optimizer", {}), **rule.text.get("optimizer", {})}
        made = {
            "batch": budget.batch,
            "warmup": budget.warmup,
            "weight_decay": budget.weight_decay,
            "clip": budget.clip,
            "evaluations": budget.evaluations,
            "device": self.plan.device,
            "precision": {"bfloat16": "bf16", "float32": "fp32"}[self.plan.precision],
            **self.options,
            **({"optimizer": optimizer} if optimizer else {}),
            "model": model,
        }
        self.text.TextRun.of({**made, "steps": self.steps, "learning_rate": 1.0}).train_settings().check()
        return made

    def sizes(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        parameters, state_size = self.text.sizes(settings["model"], self.vocabulary)
        return parameters, state_size


def value_dim(budget: Budget) -> int:
    """Value width of a head. Fixed by the budget, so that the state does not follow a width that is changed."""
    return max(1, budget.width // budget.heads) if budget.value_dim is None else budget.value_dim
