"""There are no import cycles: at module level, inside functions or through a registry of names."""

from __future__ import annotations

import graphlib
from pathlib import Path

import pytest

from tests.import_graph import Tree, package

TREE = package()
KERNELS = "prism.engine.kernels"


def test_there_are_no_import_cycles() -> None:
    assert TREE.cycles() == []


def kernel_files(tree: Tree) -> list[str]:
    """The kernels' files, each after those it imports; imports for type checkers count here. Raises CycleError for a ring."""
    edges = {
        module: {target for found in tree.imports[module] for target in found.targets if target.startswith(KERNELS)}
        for module in tree.modules
        if module.startswith(KERNELS + ".")
    }
    return [module.rpartition(".")[2] for module in graphlib.TopologicalSorter(edges).static_order()]


def test_kernel_files_import_each_other_in_one_direction() -> None:
    levels = ["available", "runtime", "launch", "memory", "serve"]
    assert [name for name in kernel_files(TREE) if name in levels] == levels


RINGS = {
    "at once": {"a.py": "import prism.b", "b.py": "from prism import a"},
    "relative": {"p/__init__.py": "", "p/a.py": "from .b import x", "p/b.py": "from . import a"},
    "in a function": {"a.py": "def f():\n    from prism.b import x", "b.py": "from prism.a import y"},
    "three": {"a.py": "import prism.b", "b.py": "import prism.c", "c.py": "class K:\n    import prism.a"},
    "by name": {"a.py": "import_module('prism.b')", "b.py": "import prism.a"},
    "registry": {"p/__init__.py": "R = {'x': 'prism.p.x:X'}", "p/x.py": "from prism.p import R"},
    "lazy public name": {
        "__init__.py": "_LAZY = {'X': 'p'}",
        "p/__init__.py": "from prism.q import y",
        "q.py": "from prism import X",
    },
    "lazy name of a package": {
        "p/__init__.py": "_LAZY = {'X': 'prism.p.x'}",
        "p/x.py": "from prism.q import y",
        "q.py": "from prism.p import X",
    },
    "itself": {"a.py": "import prism.a"},
}
NO_RINGS = {
    "for type checkers": {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from prism.b import x",
        "b.py": "from prism.a import y",
    },
    "two ways to one": {"a.py": "import prism.b, prism.c", "b.py": "import prism.c", "c.py": "import torch"},
    "a sentence": {
        "a.py": "'''About prism.b.'''\nx = 'see prism.b'",
        "b.py": "import prism.c",
        "c.py": "y = 'prism.nothing'",
    },
}


def tree(folder: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Tree(folder)


@pytest.mark.parametrize(
    "line",
    [
        "def late():\n    from prism.engine.kernels import high",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from prism.engine.kernels.high import late",
    ],
)
def test_a_ring_of_kernel_files_is_seen(line: str, tmp_path: Path) -> None:
    folder = "engine/kernels/"
    files = {"__init__.py": "", "low.py": line, "high.py": "from prism.engine.kernels.low import late"}
    with pytest.raises(graphlib.CycleError):
        kernel_files(tree(tmp_path, {folder + name: text for name, text in files.items()}))


@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_is_seen(kind: str, tmp_path: Path) -> None:
    assert len(tree(tmp_path, RINGS[kind]).cycles()) == 1


@pytest.mark.parametrize("kind", NO_RINGS)
def test_what_is_no_ring_is_not(kind: str, tmp_path: Path) -> None:
    assert tree(tmp_path, NO_RINGS[kind]).cycles() == []
