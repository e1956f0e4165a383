"""`import prism` is nothing heavy; memories and layers are torch and little more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import prism
from prism.lab.grid import HOMES

HEAVY = {
    "transformers",
    "matplotlib",
    "triton",
    "polars",
    "datasets",
    "tokenizers",
    "fla",
    "lm_eval",
    "peft",
    "rich",
    "tyro",
}
SOURCE = Path(prism.__file__).parent
REGISTERED = sorted(
    {
        found
        for path in SOURCE.rglob("*.py")
        for found in re.findall(r'"(prism(?:\.\w+)+:\w+)"(?!:)', path.read_text(encoding="utf-8"))
    }
    - {*HOMES}  # names of earlier homes, by which results are known
)
"""What registries name as "module:name", to import it when it is first used."""
STAGES = {
    "command line": "import prism.cli",
    "torch": "import torch",
    "prism": "import prism; prism.Mixer, prism.State, prism.Update, prism.memory, prism.rules",
    "mixers": "[prism.Mixer(name, 16, 2)(torch.zeros(1, 3, 16)) for name in prism.rules.names()]",
}


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    """The top-level modules of a fresh interpreter after each stage."""
    lines = ["import json, sys", "found = {}"]
    for name, statement in STAGES.items():
        lines += [statement, f"found[{name!r}] = sorted({{name.split('.')[0] for name in sys.modules}})"]
    code = "\n".join([*lines, "print(json.dumps(found))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name: set(found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


def test_help_waits_for_nothing(modules: dict[str, set[str]]) -> None:
    """So that an interrupt in the first second, too, meets a command that knows what to do."""
    assert not modules["command line"] & {*HEAVY, "torch", "numpy"}


def test_memories_and_layers_are_light(modules: dict[str, set[str]]) -> None:
    assert "torch" in modules["prism"]
    assert not (modules["prism"] - modules["torch"]) & HEAVY


@pytest.mark.parametrize("module", ["prism.recommend", "prism.serve.run", "prism.serve.lm.app"])
def test_what_serves_a_model_loads_nothing_that_trains_one(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if (name + '.').startswith('prism.train.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "first", ["prism", "prism.models", "prism.recommend.config", "transformers", "prism.models.language"]
)
def test_transformers_knows_our_models_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}, prism; from transformers import AutoConfig; print(AutoConfig.for_model('prism_rec').num_items)"
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "1000", done.stderr


@pytest.mark.parametrize("registered", REGISTERED)
def test_what_a_registry_names_exists(registered: str) -> None:
    module, _, name = registered.partition(":")
    assert hasattr(import_module(module), name)


def test_what_is_there_can_be_listed() -> None:
    assert {*prism.__all__, "engine", "models", "nn"} <= {*dir(prism)}
    with pytest.raises(AttributeError, match="module 'prism' has no attribute 'Mixr'"):
        _ = prism.Mixr


def test_running_every_rule_is_light_too(modules: dict[str, set[str]]) -> None:
    """Rules are loaded by name and the engine by form: neither may bring in what the import left out."""
    assert not (modules["mixers"] - modules["torch"]) & HEAVY


def test_type_checkers_may_use_the_annotations() -> None:
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize(("name", "extra"), [("Recommender", "rec"), ("models", "lm")])
def test_what_needs_an_extra_says_which(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(module: str) -> None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(prism, "import_module", without)
    with pytest.raises(ImportError, match=rf"prism.{name} needs transformers, from the extra {extra}: pip install"):
        prism.__getattr__(name)
