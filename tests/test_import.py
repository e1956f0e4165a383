"""`import prism` is torch and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import prism

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
STAGES = {
    "torch": "import torch",
    "prism": "import prism",
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


def test_import_prism_is_light(modules: dict[str, set[str]]) -> None:
    added = modules["prism"] - modules["torch"]
    assert "prism" in added
    assert not added & HEAVY


def test_running_every_rule_is_light_too(modules: dict[str, set[str]]) -> None:
    """Rules are loaded by name and the engine by form: neither may bring in what the import left out."""
    assert not (modules["mixers"] - modules["torch"]) & HEAVY


def test_type_checkers_may_use_the_annotations() -> None:
    assert (Path(prism.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(("name", "extra"), [("Recommender", "rec"), ("models", "lm")])
def test_what_needs_an_extra_says_which(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(module: str) -> None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(prism, "import_module", without)
    with pytest.raises(ImportError, match=rf"prism.{name} needs transformers, of the extra {extra}: pip install"):
        prism.__getattr__(name)
