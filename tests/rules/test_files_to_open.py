"""Few files explain the idea, or a rule (its own and those of `prism.rules` that it imports). docs/design.md counts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.import_graph import package

ROOT = Path(__file__).parents[2]
SOLVER = "prism.engine.fused"


def files_to_open(module: str, *others: str) -> set[str]:
    """The module and all modules of `prism.rules`, or in `others`, that it imports directly or indirectly."""
    imports = package().imports
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        found = waiting.pop()
        if found not in seen and (found.startswith("prism.rules.") or found in others):
            seen.add(found)
            waiting += [target for entry in imports[found] if not entry.typing_only for target in entry.targets]
    return seen


@pytest.mark.parametrize(
    ("rule", "others", "most"),
    [("gla", [], 6), ("prism", [SOLVER], 8)],
)
def test_a_rule_needs_few_files(rule: str, others: list[str], most: int) -> None:
    found = files_to_open(f"prism.rules.{rule}", *others)
    assert len(found) <= most, sorted(found)
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| understand the rule `{rule}` \| (\d+) \|$", design, re.MULTILINE)
    assert row is not None and int(row[1]) == len(found), f"docs/design.md: {rule} needs {len(found)} files"


def test_the_idea_needs_four_files() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    row = re.search(r"^\| understand the idea \| (\d+) \|$", design, re.MULTILINE)
    paragraph = re.search(r"^\*\*The idea\*\*(.+?)\n\n", design, re.MULTILINE | re.DOTALL)
    assert row is not None and paragraph is not None
    files = re.findall(r"`([\w/]+\.py)`", paragraph[1])
    assert len(files) == int(row[1]) <= 4
    assert all((ROOT / "src" / "prism" / file).is_file() for file in files)


def test_the_walk_follows_imports() -> None:
    assert {"prism.rules.hebbian", "prism.rules.rule", "prism.rules.parts"} < files_to_open("prism.rules.gla")
    assert SOLVER not in files_to_open("prism.rules.prism")
    assert SOLVER in files_to_open("prism.rules.prism", SOLVER)
