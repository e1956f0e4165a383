"""Packages import each other in one direction only, and serving a model loads nothing that trains one.

Imports are read from the source (import_graph.py), so that imports inside functions, names in registries and lazy public
names such as `from prism import Mixer` count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import Tree, package

TREE = package()

_CORE = {"engine", "rules", "nn", "models", "files"}
_PRODUCT = {*_CORE, "train", "reports"}
ALLOWED = {
    "files": set(),
    "engine": {"engine.kernels"},
    "engine.kernels": {"engine"},
    "rules": {"engine"},
    "nn": {"engine", "rules"},
    "models": {"engine", "rules", "nn", "files"},
    "adapters": {"engine", "rules"},
    "dropin": {"engine"},
    "reports": {"files"},
    "train": _CORE,
    "language": {*_PRODUCT, "adapters"},
    "recommend.events": {"files"},
    "recommend": {*_PRODUCT, "recommend.events"},
    "probes": {*_PRODUCT, "language", "recommend", "recommend.events"},
    "compare": {*_PRODUCT, "language", "recommend", "recommend.events", "probes"},
    "serve": {*_CORE, "reports", "language", "recommend", "recommend.events"},
    "cli": {*_PRODUCT, "serve", "language", "recommend", "recommend.events", "probes", "compare"},
}
"""Package (or module) → the others it may import. A subpackage with its own row does not belong to its package's row."""
SERVING = ("prism.recommend", "prism.serve.run", "prism.serve.lm.app")
"""What is loaded to serve a model: imports nothing of prism.train."""

FREE = ("prism.messages", "prism.device", "prism.documents", "prism.overrides")
"""Small modules below every package. They import none of them."""


def layer_of(module: str, allowed: dict[str, set[str]] = ALLOWED) -> str:
    """The row that a module belongs to, the most particular one; "prism" for what is none's."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in allowed:
            return ".".join(parts[:length])
    return "prism"


def violations(tree: Tree, layer: str, allowed: dict[str, set[str]] = ALLOWED) -> list[str]:
    """Imports of a layer that its row does not allow, each once."""
    found = {
        f"{tree.modules[module].relative_to(tree.root.parent)}:{entry.line} imports {entry.name}"
        for module, entries in tree.imports.items()
        if layer_of(module, allowed) == layer
        for entry in entries
        for target in entry.targets
        if target not in FREE
        and entry.name != "prism.__version__"
        and layer_of(target, allowed) not in {layer, *allowed[layer]}
    }
    return sorted(found)


def trainers(tree: Tree, module: str) -> list[str]:
    """The modules of prism.train that `import module` loads."""
    return sorted(name for name in tree.reached(module) if (name + ".").startswith("prism.train."))


def kernel_users(tree: Tree) -> list[str]:
    """Modules outside the kernels' folder that import something in it, also those that belong to no row."""
    inside = "prism.engine.kernels"
    return sorted(
        module
        for module, entries in tree.imports.items()
        if not (module + ".").startswith(inside + ".")
        and any((target + ".").startswith(inside + ".") for entry in entries for target in entry.targets)
    )


def triton_imports(tree: Tree) -> list[str]:
    """Modules that import Triton and are no kernels."""
    found = []
    for module, path in tree.modules.items():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        if "kernels" not in path.parent.name:
            found += [module for name in names if name.split(".")[0] == "triton"]
    return found


def test_every_package_has_its_row() -> None:
    packages = {path.name for path in TREE.root.iterdir() if path.is_dir() and list(path.glob("**/*.py"))}
    assert packages == {row.split(".")[0] for row in ALLOWED if (TREE.root / row.split(".")[0]).is_dir()}
    rows = [row for row in ALLOWED if f"prism.{row}" not in TREE.modules]
    assert not rows, "a row for something that is not there"


@pytest.mark.parametrize("layer", ALLOWED)
def test_arrows_point_one_way(layer: str) -> None:
    assert violations(TREE, layer) == []


def test_serving_loads_no_training() -> None:
    assert {module: trainers(TREE, module) for module in SERVING} == {module: [] for module in SERVING}
    code = f"import sys, {', '.join(SERVING)}; print([name for name in sys.modules if name.startswith('prism.train')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_engine_imports_kernels() -> None:
    users = kernel_users(TREE)
    assert "prism.engine.fused" in users
    assert {layer_of(module) for module in users} == {"engine"}


def test_triton_is_imported_by_kernels_alone() -> None:
    assert triton_imports(TREE) == []


def test_names_in_registries_exist() -> None:
    """`"prism.rules.gla:Gla"`: the module is there, and defines the name."""
    missing = []
    for module, path in TREE.modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                home, colon, name = node.value.partition(":")
                if colon and home.startswith("prism.") and name.isidentifier() and not _defines(home, name):
                    missing.append(f"{module}: {node.value}")
    assert missing == []


def _defines(module: str, name: str) -> bool:
    if module not in TREE.modules:
        return False
    body = ast.parse(TREE.modules[module].read_text(encoding="utf-8")).body
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name for node in body)


RULES = {
    "engine": {"engine.kernels"},
    "engine.kernels": {"engine"},
    "rules": {"engine"},
    "nn": {"engine", "rules"},
    "train": {"nn", "engine", "rules"},
    "recommend.events": set(),
    "recommend": {"train", "nn", "recommend.events"},
    "language": {"train", "nn"},
}
SMALL = {
    "__init__.py": "from importlib import import_module\n_LAZY = {'Mixer': 'nn', 'memory': 'engine'}\n__version__ = '1'\n",
    "engine/__init__.py": "def memory(): ...\n",
    "engine/dispatch.py": "from prism.engine.kernels import paths\n",
    "engine/kernels/__init__.py": "",
    "engine/kernels/paths.py": "from prism.engine import memory\nimport triton\n",
    "rules/__init__.py": "RULES = {'a': 'prism.rules.a:A'}\n",
    "rules/a.py": "import torch\nfrom prism import memory, __version__\nfrom prism.engine import memory\nfrom . import b\n",
    "rules/b.py": "",
    "nn/__init__.py": "class Mixer: ...\n",
    "train/__init__.py": "from prism import Mixer\n",
    "recommend/__init__.py": "from prism.recommend.serve import x\n",
    "recommend/serve.py": "from prism.nn import Mixer\ndef fit():\n    from prism.train import loop\n",
    "recommend/events/__init__.py": "",
    "language/__init__.py": "from prism.train import x\n",
}


def small(folder: Path, **more: str) -> Tree:
    """A tree that keeps every rule of `RULES`, with lines added to some files (`a__b` is a/b.py)."""
    files = {**SMALL}
    for name, line in more.items():
        path = name.replace("__", "/") + ".py"
        files[path] = f"{files.get(path, '')}{line}\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Tree(folder)


def test_a_good_tree_has_no_violations(tmp_path: Path) -> None:
    tree = small(tmp_path)
    assert [line for layer in RULES for line in violations(tree, layer, RULES)] == []
    assert trainers(tree, "prism.recommend") == [] and triton_imports(tree) == []
    assert kernel_users(tree) == ["prism.engine.dispatch"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("engine__dispatch", "import prism"),
        ("engine__dispatch", "import prism.nn"),
        ("engine__dispatch", "from prism import rules"),
        ("engine__dispatch", "from prism import Mixer"),
        ("engine__dispatch", "from ..rules import a"),
        ("engine__dispatch", "def late():\n    from prism.rules.a import A"),
        ("engine__dispatch", "import_module('prism.rules.a')"),
        ("engine__dispatch", "TABLE = {'a': 'prism.rules.a:A'}"),
        ("engine__kernels__paths", "from prism.rules import a"),
        ("rules__a", "from prism.engine.kernels import paths"),
        ("rules__a", "def late():\n    from prism.engine import kernels"),
        ("rules__a", "from prism import Mixer"),
        ("nn__block", "from prism.engine.kernels.paths import x"),
        ("train__loop", "from prism.recommend import serve"),
        ("train__loop", "WRITERS = ['prism.language']"),
        ("recommend__events__read", "from prism.recommend.serve import x"),
        ("recommend__serve", "from prism import language"),
        ("language__task", "from prism.recommend.reading import x"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, line: str, tmp_path: Path) -> None:
    tree = small(tmp_path, **{file: line})
    layer = layer_of("prism." + file.replace("__", "."), RULES)
    found = {layer: violations(tree, layer, RULES) for layer in RULES}
    assert [name for name, lines in found.items() if lines] == [layer] and len(found[layer]) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"recommend__serve": "from prism.train import loop"},
        {"recommend__serve": "from prism.recommend import reading", "recommend__reading": "import prism.train"},
        {"nn__block": "from prism.train.loop import x", "recommend__serve": "import prism.nn.block"},
        {
            "train__loop": "",
            "recommend__events__read": "import prism.train.loop",
            "recommend__serve": "from .events import read",
        },
    ],
)
def test_training_behind_serving_is_seen(more: dict[str, str], tmp_path: Path) -> None:
    assert trainers(small(tmp_path, **more), "prism.recommend")


@pytest.mark.parametrize(
    "line", ["from prism.engine.kernels.paths import x", "def late():\n    from prism.engine import kernels"]
)
def test_kernels_imported_by_a_module_without_a_row_are_seen(line: str, tmp_path: Path) -> None:
    users = kernel_users(small(tmp_path, device=line))
    assert [layer_of(module, RULES) for module in users] == ["prism", "engine"]


def test_triton_outside_kernels_is_seen(tmp_path: Path) -> None:
    tree = small(tmp_path, rules__a="def late():\n    import triton.language as tl")
    assert triton_imports(tree) == ["prism.rules.a"]
