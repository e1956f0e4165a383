"""Text in a plan: language models with the same budget, and mistakes that are said when the plan is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prism.lab.plan import TOLERANCE, Plan, make_plan
from prism.language.corpus import open_corpus

BUDGET = {"tokens": 4_000, "batch": 4, "width": 32, "heads": 2, "key_dim": 8, "hidden": 64, "match": "parameters"}


def text_plan(data: Path, rules: Any = ("gated_delta", "prism:steps=2"), **changes: Any) -> Plan:
    """A plan on text; changes are of the budget, or `options` and other keys of the task."""
    of_task = {name: changes.pop(name) for name in ("options", "tests", "curriculum") if name in changes}
    options = {"data": str(data), "context": 16, **of_task.pop("options", {})}
    return make_plan(
        {
            "rules": rules if isinstance(rules, dict) else list(rules),
            "seeds": [0, 1],
            "device": "cpu",
            "budget": {**BUDGET, **changes},
            "learning_rate": {"values": [1e-3, 1e-2]},
            "tasks": [{"task": "text", "label": "novels", "options": options, **of_task}],
        },
        "file",
    )


def test_rules_get_the_sizes_of_the_budget(data: Path) -> None:
    """Parameters are matched by the width of the SwiGLU."""
    base, ours, attention = text_plan(data, ["gated_delta", "prism:steps=2", "softmax"], options={"micro": 2}).entries
    assert base.function == "prism.compare.text:train_text" and base.steps == round(4_000 / (16 * 4))
    assert base.data == open_corpus(data).manifest.digest
    assert ours.state_size == base.state_size == 2 * 8 * 16 and attention.grows
    assert abs(ours.parameters - base.parameters) <= TOLERANCE * base.parameters
    model = ours.settings["model"]
    assert model["layers"] == "prism" and model["hidden_size"] == 32 and model["intermediate_size"] < 64
    assert model["rule_options"] == {"prism": {"key_dim": 8, "value_dim": 16, "conv_size": 4, "steps": 2}}
    (training, *_) = ours.final(1e-3)
    given = {"data": str(data), "context": 16, "micro": 2, "batch": 4, "precision": "fp32"}
    assert given.items() <= training.settings.items()
    assert {"seed": 0, "learning_rate": 1e-3, "test": True, "steps": base.steps}.items() <= training.settings.items()


def test_a_rule_may_have_layers_and_optimizer_settings_of_its_own(data: Path) -> None:
    groups = ["*.writes.*=lr:2"]
    own = {"model": {"layers": "prism(steps=1)+prism"}, "optimizer": {"groups": groups}}
    rules = {"a": "gated_delta", "b": {"rule": "prism", "steps": 2, "text": own}}
    first, second = text_plan(data, rules, layers=2).entries
    assert first.settings["model"]["layers"] == "gated_delta" and "optimizer" not in first.settings
    assert second.settings["model"]["layers"] == "prism(steps=1)+prism"
    assert second.settings["model"]["rule_options"]["prism"]["steps"] == 2
    assert second.settings["optimizer"] == {"groups": groups}
    assert abs(second.parameters - first.parameters) <= TOLERANCE * first.parameters


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"options": {"data": 3}}, "file: tasks[0]: options.data must be a folder of prepared tokens, got 3"),
        ({"tests": {}}, "tests is for synthetic tasks, not for 'text'"),
        ({"options": {"contxt": 32}}, "has no setting 'options.contxt' (did you mean 'context'?)"),
        ({"options": {"context": "long"}}, "options.context must be an integer, got 'long'"),
        ({"options": {"threads": 0}}, "options.threads must be at least 1, got 0"),
        ({"options": {"steps": 5}}, "options.steps is not an option of 'text': use budget.steps or budget.tokens"),
        ({"options": {"batch": 5}}, "options.batch is not an option of 'text': use budget.batch"),
        ({"options": {"seed": 5}}, "options.seed is not an option of 'text': use seeds"),
        (
            {"options": {"learning_rate": 0.1}},
            "options.learning_rate is not an option of 'text': use learning_rate.val",
        ),
        ({"options": {"test": False}}, "options.test is not an option of 'text': final runs are tested"),
        ({"options": {"model": {"layers": "linear"}}}, "options.model.layers would replace every rule of the plan"),
        ({"options": {"model": 3}}, "options.model must be a table, got 3"),
        ({"options": {"model": {"hiden_size": 2}}}, "a model has no setting 'model.hiden_size'"),
        ({"options": {"optimizer": {"grups": []}}}, "a setting optimizer.grups that does not exist"),
        ({"options": {"final": 2.0}}, "schedule.final is a fraction"),
        ({"options": {"contexts": [10**6]}}, "options.contexts has 1,000,000 tokens, but the split 'test' of"),
        ({"validation_sequences": 8}, "budget.validation_sequences is for synthetic tasks, not for 'text'"),
        ({"test_sequences": 8}, "budget.test_sequences is for synthetic tasks, not for 'text'"),
        ({"stop_at": 0.5}, "budget.stop_at is for synthetic tasks, not for 'text'"),
        ({"positions": 8}, "budget.positions is for synthetic tasks, not for 'text'"),
        (
            {"options": {"model": {"intermediate_size": 16}}},
            "rule 'prism:steps=2': its number of parameters cannot be matched by another hidden: it is",
        ),
    ],
)
def test_every_mistake_is_said_when_the_plan_is_read(data: Path, changes: dict[str, Any], sentence: str) -> None:
    rules = ["prism:steps=4", "prism:steps=2"] if "hidden:" in sentence else ["gated_delta"]
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        text_plan(data, rules, **changes)
    assert "\n" not in str(error.value)


def test_a_wrong_setting_of_one_rule_is_said(data: Path) -> None:
    rules = {"a": "linear", "b": {"rule": "linear", "text": {"optimizer": {"groups": ["x"]}}}}
    with pytest.raises(ValueError, match=r"rule 'b': optimizer.groups has 'x'"):
        text_plan(data, rules, match="none")
