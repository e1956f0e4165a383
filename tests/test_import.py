"""`import prism` is torch and little more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
