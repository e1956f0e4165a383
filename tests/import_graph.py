"""Which module of the package imports which, read off the source: also inside functions, by name, and through registries."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import prism

LAZY_TABLES = ("_LAZY",)
"""Dictionaries in a package's `__init__.py` from public names to the modules that have them."""


@dataclass(frozen=True)
class Import:
    """One import. `name` is what the source asks for, `targets` the modules that are loaded for it."""

    line: int
    name: str
    targets: tuple[str, ...]
    eager: bool
    """False inside functions and for names in strings."""
    typing_only: bool = False


class Tree:
    """The modules below a folder, as the package `prism`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def modules(self) -> dict[str, Path]:
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = ["prism", *path.relative_to(self.root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {module: sorted(self._imports(module), key=lambda found: found.line) for module in self.modules}

    @cached_property
    def _public(self) -> dict[str, str]:
        """Full name of a public name → the module that has it."""
        homes = {}
        for module, path in self.modules.items():
            for node in ast.parse(path.read_text(encoding="utf-8")).body if path.name == "__init__.py" else ():
                if isinstance(node, ast.Assign) and any(getattr(t, "id", "") in LAZY_TABLES for t in node.targets):
                    for name, home in ast.literal_eval(node.value).items():
                        homes[f"{module}.{name}"] = home if home.startswith("prism.") else f"{module}.{home}"
        return homes

    def _imports(self, module: str) -> Iterator[Import]:
        path = self.modules[module]
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        for node, eager, typing_only in _walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*origin, *([node.module] if node.module else [])])
                names = [f"{source}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and re.fullmatch(r"prism(\.\w+)+(:\w+)?", str(node.value)):
                names, eager = [str(node.value).partition(":")[0]], False
                if names[0] not in self.modules:
                    continue
            else:
                continue
            for name in names:
                if name == "prism" or name.startswith("prism."):
                    yield Import(node.lineno, name, self.loaded(name), eager, typing_only)
        for name, home in self._public.items():
            if name.rpartition(".")[0] == module:
                yield Import(1, name, (home,), False)

    def loaded(self, name: str) -> tuple[str, ...]:
        """The modules behind `prism.x.y`: a module itself, or the package that has the name and where that gets it from."""
        while name not in self.modules:
            parent = name.rpartition(".")[0]
            if not parent:
                return ()
            if name in self._public:
                return (self._public[name],) if parent == "prism" else (parent, self._public[name])
            name = parent
        return (name,)

    def reached(self, start: str) -> set[str]:
        """All modules that `import start` loads, the packages on the way included."""
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            module = waiting.pop()
            if module in seen or module not in self.modules:
                continue
            seen.add(module)
            waiting.append(module.rpartition(".")[0])
            waiting += [
                t for found in self.imports[module] if found.eager and not found.typing_only for t in found.targets
            ]
        return seen

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import one another in a ring; imports for type checkers do not count."""
        edges = {
            module: {t for found in imports if not found.typing_only for t in found.targets}
            for module, imports in self.imports.items()
        }
        return [sorted(group) for group in _components(edges) if len(group) > 1 or group[0] in edges[group[0]]]


@cache
def package() -> Tree:
    """The package itself, read once."""
    return Tree(Path(prism.__file__).parent)


def _walk(node: ast.AST, eager: bool = True, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    unseen = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        inner = eager and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        hidden = typing_only or (unseen and child in node.body)
        yield child, inner, hidden
        yield from _walk(child, inner, hidden)


def _components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components: who reaches whom, both ways. (Tarjan's algorithm, without recursion.)"""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in edges:
        work = [(start, iter(sorted(edges[start])))] if start not in index else []
        while work:
            node, following = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            for other in following:
                if other in edges and other not in index:
                    work.append((other, iter(sorted(edges[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(stack[cut:])
                    del stack[cut:]
    return found
