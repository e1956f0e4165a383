"""A plan: what a file may say, what it becomes, and that every mistake is one sentence that names its key."""

from __future__ import annotations

import copy
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import rules
from prism.lab.grid import Records
from prism.lab.plan import TOLERANCE, closest, make_plan, read_plan
from prism.lab.probe import ProbeRun

PLAN: dict[str, Any] = {
    "rules": ["gated_delta", "prism:steps=2", "linear"],
    "seeds": [0, 1],
    "device": "cpu",
    "jobs": 2,
    "budget": {"steps": 20, "batch": 4, "key_dim": 8, "width": 32},
    "learning_rate": {"values": [3e-3, 1e-2, 3e-2], "seeds": [7, 8]},
    "tasks": [{"task": "mqar", "options": {"pairs": 2, "length": 8, "vocabulary": 16}}],
}


def changed(**changes: Any) -> dict[str, Any]:
    """The plan with changes; `budget__steps=3` changes a key of a section, None removes it."""
    plan = copy.deepcopy(PLAN)
    for name, value in changes.items():
        *sections, key = name.split("__")
        place = plan
        for section in sections:
            place = place[section]
        if value is None:
            place.pop(key)
        else:
            place[key] = value
    return plan


def test_every_rule_has_the_same_tries_data_and_budget() -> None:
    plan = make_plan(PLAN, "file")
    assert plan.reference == "gated_delta" and plan.rules == PLAN["rules"] and plan.tasks == ["mqar"]
    assert plan.runs == 3 * (3 * 2 + 2)
    searches = [entry.search() for entry in plan.entries]
    assert {len(search) for search in searches} == {6}
    for trainings in zip(*searches, strict=True):
        assert len({(t.settings["learning_rate"], t.settings["seed"]) for t in trainings}) == 1
        assert len({t.key for t in trainings}) == 3
    for entry in plan.entries:
        runs = [ProbeRun.from_plain(training.settings) for training in (*entry.search(), *entry.final(1e-2))]
        assert [run.seed for run in runs if run.test] == [0, 1]
        assert {run.seed for run in runs if not run.test} == {7, 8}
        assert {(run.task, run.steps, run.batch, run.device) for run in runs} == {("mqar", 20, 4, "cpu")}
        assert entry.state_size == 8 * 32


def test_tokens_give_the_steps_and_a_task_may_have_its_own_budget() -> None:
    tasks = [PLAN["tasks"][0], {**PLAN["tasks"][0], "label": "long", "budget": {"tokens": 640, "key_dim": [4, 8]}}]
    plan = make_plan(changed(tasks=tasks), "file")
    assert {entry.steps for entry in plan.entries if entry.task == "mqar"} == {20}
    long = [entry for entry in plan.entries if entry.task == "long"]
    assert {entry.steps for entry in long} == {640 // (4 * 8)}
    assert [(entry.size, entry.state_size) for entry in long] == [(0, 128)] * 3 + [(1, 256)] * 3


def test_the_search_may_be_shorter_or_absent() -> None:
    plan = make_plan(changed(learning_rate__steps=5), "file")
    assert {training.steps for training in plan.entries[0].search()} == {5}
    assert {training.steps for training in plan.entries[0].final(1e-2)} == {20}
    assert make_plan(changed(learning_rate__values=[1e-2]), "file").entries[0].search() == []


def test_only_keeps_the_reference() -> None:
    plan = make_plan(PLAN, "file").only(re.compile("linear"))
    assert plan.rules == ["gated_delta", "linear"]
    with pytest.raises(ValueError, match="'nothing' finds none of the runs, such as 'mqar, gated_delta"):
        plan.only(re.compile("nothing"))


def test_some_of_the_seeds() -> None:
    plan = make_plan(PLAN, "file")
    one = plan.with_seeds([1])
    assert one.runs == plan.runs - 3 and all(entry.seeds == (1,) for entry in one.entries)
    keys = [{t.key for entry in chosen.entries for t in entry.final(1e-2)} for chosen in (one, plan)]
    assert keys[0] < keys[1]  # the same runs, so that nothing is computed twice
    for wrong, said in (([0, 2], "0 2"), ([1, 1], "1 1"), ([], "none")):
        with pytest.raises(ValueError, match=f"some of the plan's, 0 1; got {said}"):
            plan.with_seeds(wrong)


def test_rules_may_have_names_of_their_own() -> None:
    table = {"base": "gated_delta", "ours": {"rule": "prism", "steps": 3}}
    plan = make_plan(changed(rules=table, reference="base"), "file")
    assert plan.rules == ["base", "ours"]
    assert plan.entries[1].settings["model"]["options"] == {"steps": 3}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rules": None}, "file: rules must be a list"),
        ({"rules": []}, "file: rules must be a list"),
        ({"rules": ["prsim"]}, "file: rules: unknown rule 'prsim'"),
        ({"rules": {"a": 3}}, "file: rules.a must be a text"),
        ({"rules": {"a": {"rule": "delta", "text": 3}}}, "file: rules.a.text must be a table with tables"),
        ({"rules": {"a": {"rule": "delta", "text": {"model": "x"}}}}, "file: rules.a.text must be a table with tables"),
        ({"rules": {"a": {"rule": "delta", "text": {"modl": {}}}}}, "got 'modl' (did you mean 'model'?)"),
        ({"rules": ["prism:steps"]}, "must look like name=value"),
        ({"rules": ["prism:stepz=2"]}, "tasks[0], rule 'prism:stepz=2': rule 'prism' has no option 'stepz'"),
        ({"reference": "delta"}, "file: reference must be one of the rules gated_delta, prism:steps=2, linear"),
        ({"tasks": []}, "file: tasks must be one or more tables [[tasks]]"),
        ({"tasks": [{"options": {}}]}, "file: tasks[0].task must be the name of a task, got None"),
        ({"tasks": [{"task": "mqarr"}]}, "file: tasks[0]: unknown task 'mqarr' (did you mean 'mqar'?)"),
        ({"tasks": [{"task": "texts"}]}, "unknown task 'texts' (did you mean 'text'?): choose from mqar, "),
        ({"tasks": [{"task": "x"}]}, "multi_pair, needle, regression, parity, modular, group, nine, text"),
        ({"rules": ["delta", "mesa"], "reference": "delta"}, "make them equal, or set budget.equal_state = false"),
        ({"tasks": [{"task": "mqar", "opt": 1}]}, "file has a setting tasks[0].opt that does not exist"),
        ({"tasks": [{"task": "mqar", "options": {"pars": 2}}]}, "has a setting pars that does not exist"),
        ({"tasks": [{"task": "mqar", "options": {"pairs": "x"}}]}, "pairs must be an integer, got 'x'"),
        (
            {"tasks": [{"task": "mqar", "options": {"pairs": 99}}]},
            "file: tasks[0]: length must be even and ≥ 4 · pairs",
        ),
        ({"tasks": [{"task": "mqar", "tests": {"a": {"pears": 2}}}]}, "has a setting pears that does not exist"),
        (
            {"tasks": [{"task": "mqar", "budget": {"step": 2}}]},
            "tasks[0].budget.step that does not exist (did you mean",
        ),
        (
            {"tasks": [{"task": "mqar", "curriculum": {"option": "size", "start": 2}}]},
            "file: tasks[0]: curriculum.option must be a whole-number option of task 'mqar', got 'size'",
        ),
        (
            {"tasks": [{"task": "mqar", "curriculum": {"option": "length", "start": 64}}]},
            "file: tasks[0]: curriculum.start must be from 1 to 63",
        ),
        ({"tasks": [{"task": "mqar"}, {"task": "mqar"}]}, "file: two tasks have the label 'mqar'"),
        ({"budget__steps": None}, "file: budget must have either steps or tokens"),
        ({"budget__tokens": 100}, "file: budget must have either steps or tokens"),
        ({"budget__steps": 0}, "file: budget.steps must be at least 1, got 0"),
        ({"budget__steps": "many"}, "file: budget.steps must be an integer, got 'many'"),
        ({"budget__key_dim": []}, "file: budget.key_dim must be a list of one or more different numbers"),
        ({"budget__match": "state"}, "file: budget.match must be one of none, parameters, got 'state'"),
        ({"budget__widht": 2}, "file has a setting budget.widht that does not exist (did you mean budget.width?)"),
        ({"learning_rate__values": [0.0]}, "file: learning_rate.values must be above 0, got 0"),
        ({"learning_rate__seeds": [1, 9]}, "file: learning_rate.seeds must not contain a final seed, got [1]"),
        ({"seeds": [1, 1]}, "file: seeds must be a list of one or more different numbers, got [1, 1]"),
        ({"jobs": 0}, "file: jobs must be at least 1, got 0"),
        ({"device": "gpu"}, "file: device must be auto, cpu, cuda or a GPU such as cuda:1, got 'gpu'"),
        ({"rules": ["linear", "delta", "linear"]}, "file: rules has 'linear' twice: remove one"),
        ({"tasks": [{"task": "mqar", "label": 3}]}, "file: tasks[0].label must be a text, got 3"),
        ({"tasks": [{"task": "mqar", "options": "x"}]}, "file: tasks[0].options must be a table, got 'x'"),
        ({"tasks": [{"task": "mqar", "budget": 3}]}, "file: tasks[0].budget must be a table, got 3"),
        ({"tasks": [{"task": "mqar", "tests": ["a"]}]}, "file: tasks[0].tests must be a table, got ['a']"),
        (
            {"tasks": [{"task": "mqar", "tests": {"a": "b"}}]},
            "file: tasks[0].tests.a must be a table of options, got 'b'",
        ),
        (
            {"tasks": [{"task": "mqar", "curriculum": {"optin": "length", "start": 8}}]},
            "file has a setting tasks[0].curriculum.optin that does not exist (did you mean tasks[0].curriculum.option?)",
        ),
        (
            {"tasks": [{"task": "mqar", "curriculum": {"option": "length"}}]},
            "file: tasks[0].curriculum must have option and start",
        ),
        (
            {"tasks": [{"task": "mqar", "curriculum": {"option": "length", "start": "8"}}]},
            "file: tasks[0].curriculum.start must be an integer, got '8'",
        ),
        ({"budget__batch": 0}, "file: budget.batch must be at least 1, got 0"),
        ({"budget__width": 0}, "file: budget.width must be at least 1, got 0"),
        ({"budget__hidden": -1}, "file: budget.hidden must be at least 0, got -1"),
        ({"budget__key_dim": [8, 0]}, "file: budget.key_dim must be at least 1, got 0"),
        ({"budget__evaluations": 0}, "file: budget.evaluations must be at least 1, got 0"),
        ({"budget__weight_decay": -1.0}, "file: budget.weight_decay must be at least 0, got -1"),
        ({"budget__clip": 0.0}, "file: budget.clip must be above 0, got 0"),
        ({"budget__warmup": 1.0}, "file: budget.warmup must be at least 0 and below 1, got 1"),
        ({"budget__stop_at": float("nan")}, "file: budget.stop_at must be a finite number, got nan"),
        (
            {"tasks": [{"task": "mqar", "budget": {"clip": -1.0}}]},
            "file: tasks[0]: budget.clip must be above 0, got -1",
        ),
        ({"precision": "half"}, "file: precision must be one of float32, bfloat16, got 'half'"),
        ({"rules": ["gated_delta", "slstm"]}, "its state size is 128, the reference's 256"),
        (
            {"rules": ["gated_delta", "prism:preset=paper"], "budget__match": "parameters"},
            "its number of parameters cannot be matched by another width",
        ),
    ],
)
def test_every_mistake_is_one_sentence_that_names_the_key(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        make_plan(changed(**changes), "file")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_positions_must_reach_to_the_end_of_the_longest_test() -> None:
    """Training has sequences of 8 tokens, one of the tests of 32."""
    task = {**PLAN["tasks"][0], "tests": {"short": {"length": 8}, "long": {"length": 32}}}
    assert make_plan(changed(tasks=[task], budget__positions=32), "file").entries
    with pytest.raises(ValueError, match=r"file: tasks\[0\]: budget.positions must be at least 32, .*, got 31"):
        make_plan(changed(tasks=[task], budget__positions=31), "file")


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no settings file"):
        read_plan(tmp_path / "plan.toml")
    (tmp_path / "plan.toml").write_text("rules = [")
    with pytest.raises(ValueError, match="is not a TOML file"):
        read_plan(tmp_path / "plan.toml")


def test_caches_are_compared_whatever_they_hold() -> None:
    plan = make_plan(changed(rules=["gated_delta", "softmax"]), "file")
    assert [entry.grows for entry in plan.entries] == [False, True]


LARGE = {"rwkv6", "mom"}
"""Rules with more parameters than the reference, even without a SwiGLU."""
KEPT = [name for name in rules.names() if "value_dim" in rules.get(name).option_names() and name[:4] != "rwkv"]
"""Rules whose memory does not follow the width of the model."""


@settings(max_examples=8)
@given(st.sampled_from(rules.names()), st.integers(1, 2), st.sampled_from([32, 48]))
def test_parameters_match_within_one_percent_by_the_width_of_the_swiglu(name: str, layers: int, width: int) -> None:
    sizes = {"width": width, "layers": layers, "heads": 2, "hidden": 64, "equal_state": False, "key_dim": 8}
    values = changed(rules={"reference": "gated_delta", "other": name}, budget={"steps": 1, **sizes})
    _, free = make_plan(values, "file").entries
    values["budget"]["match"] = "parameters"
    if name in LARGE:
        with pytest.raises(ValueError, match="cannot be matched by another hidden"):
            make_plan(values, "file")
        return
    reference, other = make_plan(values, "file").entries
    assert abs(other.parameters - reference.parameters) <= TOLERANCE * reference.parameters
    assert other.state_size == free.state_size
    assert other.settings["model"]["width"] == width


@settings(max_examples=8)
@given(st.sampled_from(KEPT), st.integers(1, 2), st.sampled_from([64, 96]))
def test_without_a_swiglu_they_match_by_the_width_of_the_model(name: str, layers: int, width: int) -> None:
    sizes = {"width": width, "layers": layers, "heads": 2, "equal_state": False, "key_dim": 8, "match": "parameters"}
    values = changed(rules={"reference": "gated_delta", "other": name}, budget={"steps": 1, **sizes})
    reference, other = make_plan(values, "file").entries
    assert abs(other.parameters - reference.parameters) <= TOLERANCE * reference.parameters
    assert other.settings["model"]["value_dim"] == reference.settings["model"]["value_dim"] == width // 2


@given(st.integers(1, 50), st.integers(0, 1000), st.integers(1, 100_000))
def test_the_roundest_close_width_is_found(slope: int, start: int, target: int) -> None:
    def count(width: int) -> int:
        return start + slope * width

    reachable = [
        width for width in range(1, target + target // 50 + 2) if abs(count(width) - target) <= TOLERANCE * target
    ]
    if not reachable:
        with pytest.raises(ValueError, match="the closest to"):
            closest(count, target)
        return
    found = closest(count, target)
    assert found in reachable
    assert all(width % 64 for width in reachable) or found % 64 == 0


@given(st.integers(1, 10**6), st.integers(1, 10**7))
def test_a_number_that_no_width_changes_is_found_or_refused(number: int, target: int) -> None:
    if abs(number - target) <= TOLERANCE * target:
        assert closest(lambda width: number, target) >= 1
        return
    with pytest.raises(ValueError, match=f"{number:,}"):
        closest(lambda width: number, target)


@given(st.integers(1, 50_000), st.integers(0, 10**8), st.integers(1, 10**9))
def test_few_models_are_built_to_find_a_width(slope: int, start: int, target: int) -> None:
    built = []

    def count(width: int) -> int:
        built.append(width)
        return start + slope * width

    with suppress(ValueError):
        closest(count, target)
    assert len(built) == len(set(built)) <= 30 and (target > 10**6 * slope or len(built) <= 22)


def test_results_of_a_rule_with_other_defaults_are_not_taken_for_finished(tmp_path: Path) -> None:
    """The key of a run has only the options that the plan gives, and the defaults of a later version may differ."""
    plan = make_plan(PLAN, "file")
    prism = plan.entries[1]
    assert "steps" not in prism.defaults and prism.defaults["timescales"] == [1.0, 1024.0]
    training = prism.final(1e-2)[1]
    records = Records(tmp_path / "results.jsonl")
    with records.writing():
        records.add(training, "done", result={"scores": {"": 1.0}})
    plan.check_results(Records(records.path))
    line = json.loads(records.path.read_text())
    line["result"]["parameters"] = prism.parameters + 1
    records.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(
        ValueError, match=r"another version of a model, with .* and now these are .* choose another folder"
    ):
        plan.check_results(Records(records.path))
    del line["result"]["parameters"]
    line["defaults"] |= {"timescales": "drawn", "gone": 1}  # an option that no longer exists says nothing
    records.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(
        ValueError, match=r"the default of timescales was 'drawn', and now it is \[1.0, 1024.0\] .*prism"
    ):
        plan.check_results(Records(records.path))
    given = make_plan(changed(rules=["gated_delta", "prism:steps=2,timescales=drawn"]), "file")
    given.check_results(Records(records.path))


def test_a_default_that_depends_on_other_options_is_compared_too(tmp_path: Path) -> None:
    """PRISM's output gate was SiLU; a mean must not mix both."""
    rules = ["prism:steps=2", "prism:steps=1", "prism:steps=2,gate_by=silu"]
    plan = make_plan(
        changed(rules=rules, reference=rules[0], budget={**PLAN["budget"], "match": "none", "equal_state": False}),
        "file",
    )
    assert [entry.defaults.get("gate_by") for entry in plan.entries] == ["sigmoid", "silu", None]
    records = Records(tmp_path / "results.jsonl")
    with records.writing():
        records.add(plan.entries[0].final(1e-2)[0], "done", result={"scores": {"": 1.0}})
    line = json.loads(records.path.read_text())
    line["defaults"]["gate_by"] = "silu"
    records.path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="the default of gate_by was 'silu', and now it is 'sigmoid'"):
        plan.check_results(Records(records.path))
