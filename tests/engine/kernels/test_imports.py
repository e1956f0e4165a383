"""Who imports the kernels: the engine alone; and the kernels' own files import each other in one direction."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import prism

ROOT = Path(prism.__file__).parent
KERNELS = "prism.engine.kernels"


def imported(source: str) -> Iterator[str]:
    """Full names of all that a file imports, also inside functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def kernel_modules(source: str) -> set[str]:
    """The kernels' modules that a file imports, by their short names."""
    names = [name.removeprefix(KERNELS + ".") for name in imported(source) if name.startswith(KERNELS + ".")]
    return {name.split(".")[0] for name in names}


def files() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent.name != "kernels"
    }


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    return {name: kernel_modules(source) for name, source in sources.items()}


def test_only_the_engine_imports_kernels() -> None:
    users = {name for name, source in files().items() if kernel_modules(source)}
    assert users, "the engine does"
    assert {name.split("/")[0] for name in users} == {"engine"}
    assert "engine/fused.py" in users


def test_the_kernels_files_import_each_other_in_one_direction() -> None:
    folder = ROOT / "engine" / "kernels"
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    order = list(graphlib.TopologicalSorter(graph(sources)).static_order())
    assert order.index("available") < order.index("runtime") < order.index("launch") < order.index("memory")
    assert order.index("memory") < order.index("serve")


def test_a_cycle_through_a_function_is_seen() -> None:
    sources = {
        "low": "def late():\n    from prism.engine.kernels import high\n",
        "high": "from prism.engine.kernels.low import late\n",
    }
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph(sources)).static_order())
