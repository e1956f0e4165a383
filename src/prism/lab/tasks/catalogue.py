"""The synthetic tasks by name. A task's module is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

from prism.lab.tasks.task import Task
from prism.messages import did_you_mean
from prism.overrides import override

TASKS = {
    "mqar": "mqar:Recall",
    "mqar_mix": "mqar_mix:RecallMix",
    "multi_pair": "multi_pair:MultiPair",
    "needle": "needle:Needle",
    "regression": "regression:Regression",
    "parity": "tracking:Parity",
    "modular": "tracking:ModularArithmetic",
    "group": "groups:GroupWords",
    "nine": "nine:NineProbes",
}
"""Name of a task → its module in this folder and its class."""


def task_class(name: str, others: Sequence[str] = ()) -> type[Task]:
    """The class of a task; ValueError for an unknown name.

    Args:
        others: further names to choose from, for the message.
    """
    if name not in TASKS:
        known = [*TASKS, *others]
        raise ValueError(f"unknown task {name!r}{did_you_mean(name, known)}: choose from {', '.join(known)}")
    module, attribute = TASKS[name].split(":")
    found: type[Task] = getattr(import_module(f"{__package__}.{module}"), attribute)
    return found


def build_task(name: str, options: Mapping[str, Any], where: str = "") -> Task:
    """A task with its options; a wrong option or value is a ValueError of one sentence.

    Args:
        where: where the options come from, for the message. Empty: the task itself.
    """
    where, known = where or f"task {name!r}", option_names(name)
    wrong = next((option for option in options if option not in known), None)
    if wrong is not None:
        hint = did_you_mean(wrong, known, str)
        raise ValueError(f"{where} has a setting {wrong} that does not exist{hint}: choose from {', '.join(known)}")
    return override(task_class(name)(), dict(options), where)


def option_names(name: str) -> list[str]:
    """The names of a task's options."""
    return [field.name for field in fields(task_class(name))]
