"""What torch, numpy and safetensors are enough for: memories, rules and layers; the command says what else it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from prism.overrides import read_toml

ROOT = Path(__file__).parent.parent
BLOCK = """
import sys
from importlib.machinery import PathFinder

class Blocker(PathFinder):
    names = {"tyro", "rich", "transformers", "tokenizers", "datasets", "polars", "pandas", "matplotlib",
             "filelock", "tensorboard", "triton", "fla", "lm_eval", "peft", "accelerate"}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.names else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Blocker
"""
CORE = """
import importlib, pkgutil, torch, prism
from prism import engine, nn, rules

kernels = ("prism.engine.kernels.", "prism.engine.layer_ops_cuda")
for package in (engine, nn, rules):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not any(part in module.name for part in kernels):  # Triton's language
            importlib.import_module(module.name)
x = torch.randn(1, 6, 16)
for name in rules.names():
    mixer = prism.Mixer(name, 16, 2)
    first, state = mixer(x[:, :4])
    second, state = mixer(x[:, 4:], state)
    (first.sum() + second.sum()).backward()
    mixer.decode(x[:, 0], state.detach())
with prism.engine.using(form="scan", backend="torch"):
    o, state = prism.memory(prism.Update(torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 1, 8), torch.randn(1, 5, 2, 1, 4)))
print("done", sorted(Blocker.names & {name.partition(".")[0] for name in sys.modules}))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code, *arguments], capture_output=True, text=True, timeout=300)


def test_memories_rules_and_layers_need_no_extra() -> None:
    done = run(CORE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "done []"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("rules", 'prism rules: needs tyro, from the extra cli: pip install ".[cli]"'),
        ("train lm --steps 1", 'prism train lm: needs tyro, from the extra lm: pip install ".[lm]"'),
        ("recommend x", 'prism recommend: needs tyro, from the extra rec: pip install ".[rec]"'),
    ],
)
def test_the_command_says_what_to_install(words: str, sentence: str) -> None:
    done = run("from prism.cli import main\nsys.exit(main(sys.argv[1:]))", *words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(sentence) and len(done.stderr.splitlines()) == 1 and not done.stdout


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0)])
def test_help_needs_no_extra_and_names_one(words: list[str], code: int) -> None:
    done = run("from prism.cli import main\nsys.exit(main(sys.argv[1:]))", *words)
    assert done.returncode == code and "prism COMMAND" in done.stdout
    assert done.stderr.startswith("\nprism needs tyro, from the extra lm: pip install")


@pytest.mark.parametrize(
    ("statement", "package", "extra"),
    [
        ("import prism.models", "models", "lm"),
        ("from prism.recommend import Recommender", "recommend", "rec"),
        ("import prism.hf.adapters", "hf.adapters", "adapters"),
    ],
)
def test_a_package_says_what_to_install(statement: str, package: str, extra: str) -> None:
    done = run(statement)
    assert re.search(rf"^ModuleNotFoundError: prism.{package} needs \w+, from the extra {extra}: ", done.stderr, re.M)


def test_the_largest_extra_is_named_at_once() -> None:
    done = run("from prism.cli import main\nsys.exit(main(sys.argv[1:]))", "serve", "rec", "x")
    assert done.stderr.startswith("prism serve rec: needs tyro, from the extra serve: ")


def requirements(block: str) -> dict[str, str]:
    """`{name: range}` of the core, an extra or a group of pyproject.toml."""
    project = read_toml(ROOT / "pyproject.toml")
    blocks = {**project["project"]["optional-dependencies"], **project["dependency-groups"]}
    lines = project["project"]["dependencies"] if block == "core" else blocks[block]
    found = (re.match(r"([\w.-]+(?:\[[\w,]+\])?)(.*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match is not None}


def test_the_core_is_three_libraries() -> None:
    assert set(requirements("core")) == {"torch", "numpy", "safetensors"}


@pytest.mark.parametrize(
    ("extra", "name"), [("lm", "transformers"), ("rec", "transformers"), ("adapters", "peft"), ("gpu", "triton")]
)
def test_what_is_used_in_private_has_an_upper_bound(extra: str, name: str) -> None:
    assert "<" in requirements(extra)[name]


@pytest.mark.parametrize("extra", ["lm", "rec"])
def test_models_bring_the_command(extra: str) -> None:
    assert "prism-sequence[cli,plots]" in requirements(extra)
