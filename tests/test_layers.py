"""The architecture's arrows point one way: cli → train → evaluate → models → nn → rules → engine; data serves the first three.

Read off the source, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import prism

ROOT = Path(prism.__file__).parent

_MODELS = {"models", "nn", "rules", "engine"}
ALLOWED = {
    "engine": set(),
    "rules": {"engine"},
    "nn": {"rules", "engine"},
    "models": {"nn", "rules", "engine"},
    "adapters": _MODELS,
    "data": set(),
    "train": {"evaluate", "data", "adapters", *_MODELS},
    "evaluate": {"data", "adapters", *_MODELS},
    "recommend": {"train", "evaluate", "data", *_MODELS},
    "cli": {"recommend", "train", "evaluate", "data", "adapters", *_MODELS},
}
LAYERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("**/*.py")))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of this package that a file imports."""
    package = ["prism", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*origin, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif _loads_by_name(node):
            names = [node.args[0].value]
        else:
            continue
        for name in names:
            if name == "prism" or name.startswith("prism."):
                yield node.lineno, name


def _loads_by_name(node: ast.AST) -> bool:
    """`import_module("prism.…")`."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
    )


def _shortcuts() -> dict[str, str]:
    """What `prism/__init__.py` offers, and from which layer it comes."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module.split(".")[1]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("prism.")
        for alias in node.names
    }


def layer_of(name: str) -> str | None:
    """The layer that `prism.x.y` belongs to; None for what has none (`prism.__version__`)."""
    parts = name.split(".")
    if len(parts) == 1:
        return "prism"  # all of it
    return _shortcuts().get(parts[1], parts[1] if (ROOT / parts[1]).is_dir() else None)


def violations(layer: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT.parent)}:{line} imports {name}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for line, name in imported(path)
        if layer_of(name) not in {layer, None, *ALLOWED[layer]}
    ]


def test_every_layer_has_its_place() -> None:
    assert set(LAYERS) <= set(ALLOWED), "a new package needs its arrows"
    assert {"engine", "rules", "nn"} <= set(LAYERS)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer in ALLOWED])
def test_arrows_point_one_way(layer: str) -> None:
    assert violations(layer) == []


def test_triton_is_imported_by_kernels_alone() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        if "kernels" not in path.parent.name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
            modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            assert not [name for name in modules if name.split(".")[0] == "triton"], path


def test_a_wrong_arrow_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "rules").mkdir()
    (tmp_path / "__init__.py").write_text("from prism.nn import Mixer\n")
    (tmp_path / "rules" / "good.py").write_text("import torch\nfrom prism.engine import memory\nfrom . import parts\n")
    lines = [
        "import prism",
        "import prism.nn.mixer",
        "from prism import rules",
        "from prism import Mixer",
        "from ..rules import parts",
        "def late():\n    from prism.rules.parts import ShortConv",
        "import_module('prism.rules.prism')",
    ]
    (tmp_path / "engine" / "bad.py").write_text("\n".join(lines))
    (tmp_path / "nn").mkdir()
    monkeypatch.setattr("test_layers.ROOT", tmp_path)
    assert violations("rules") == []
    assert len(violations("engine")) == len(lines)
