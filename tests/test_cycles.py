"""No module imports itself in a ring, neither at once nor inside a function nor through a registry of names."""

from __future__ import annotations

from pathlib import Path

import pytest

import prism
from tests.import_graph import Tree


def test_there_are_no_import_cycles() -> None:
    assert Tree(Path(prism.__file__).parent).cycles() == []


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


@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_is_seen(kind: str, tmp_path: Path) -> None:
    assert len(tree(tmp_path, RINGS[kind]).cycles()) == 1


@pytest.mark.parametrize("kind", NO_RINGS)
def test_what_is_no_ring_is_not(kind: str, tmp_path: Path) -> None:
    assert tree(tmp_path, NO_RINGS[kind]).cycles() == []
