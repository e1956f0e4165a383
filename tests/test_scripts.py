"""Scripts outside the package import names that it has: benchmarks, examples, experiments and tools, also inside functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "examples", "experiments", "scripts", "docs/tools")
    for path in (ROOT / folder).rglob("*.py")
)


def imported(text: str) -> Iterator[tuple[str, str | None]]:
    """Module and name of every import of prism; the name is None for `import prism.x`. Code in strings counts too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if re.match(r"prism\b", alias.name))
        elif isinstance(node, ast.ImportFrom) and re.match(r"prism\b", node.module or ""):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search(r"(?m)^import .*prism", node.value)
        ):
            yield from imported(node.value)


def missing(text: str) -> list[str]:
    """Imports of prism that do not work."""
    return [f"{module}: {name}" for module, name in imported(text) if not exists(module, name)]


def exists(module: str, name: str | None) -> bool:
    try:
        loaded = import_module(module)
        if name is not None and not hasattr(loaded, name):
            import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name == "triton":
            pytest.skip("imports kernels, which need Triton: not on macOS")
        return False
    return True


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports_of_prism_exist(script: str) -> None:
    assert missing((ROOT / script).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import prism.gone",
        "from prism.engine import gone",
        "def main():\n    from prism.engine.gone import memory",
        "CODE = '''\nimport time, prism\nfrom prism.engine.kernels import gone\n'''",
    ],
)
def test_a_missing_name_is_seen(text: str) -> None:
    assert len(missing(text)) == 1
