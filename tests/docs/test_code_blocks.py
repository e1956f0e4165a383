"""Every Python block of README and docs runs, prints what the page shows, and every docstring example holds.

The blocks of a page run in order, in one namespace and an empty folder. A block followed by a ```text block must print it.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import prism
from prism.cli import main
from tests.tiny_lm import save_lm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(source, what it must print or "") of every Python block of a page."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def train_language_model(out: str = "runs/mine") -> None:
    """What `prism train lm --out runs/mine` leaves behind, as small as it can be."""
    Path("texts").mkdir()
    Path("texts/story.txt").write_text("Once upon a time there was a memory of fixed size. " * 40, encoding="utf-8")
    small = "--model.hidden-size 16 --model.num-heads 1 --model.num-hidden-layers 1 --data.context 32"
    assert main(f"train lm --data.sources texts/ --out {out} --steps 1 --device cpu {small}".split()) == 0


def train_adapter() -> None:
    """What the commands of the page leave behind, as small as they can be."""
    for folder in ("texts", "new"):
        Path(folder).mkdir()
        Path(folder, "story.txt").write_text("Once there was a memory of fixed size. " * 40, encoding="utf-8")
    small = "--model.hidden-size 16 --model.num-heads 1 --model.num-hidden-layers 1 --data.context 32 --device cpu"
    command = "train lm --model.layers gated_delta --data.sources texts/ --out runs/base --steps 1"
    assert main(f"{command} {small}".split()) == 0
    command = "adapt runs/base --data new/ --out runs/adapted --adapter.rank 8 --steps 1"
    assert main(f"{command} --data.context 32 --device cpu".split()) == 0


def export_as_onnx() -> None:
    """What `prism export runs/mine --format onnx --out onnx/mine` leaves behind; a saved model takes the place of the run."""
    assert main(["export", str(save_lm(Path("model"), "linear")), "--format", "onnx", "--out", "onnx/mine"]) == 0


def write_events() -> None:
    """A table with the columns, users and items that the page names."""
    people, things = ["ann", "bob", *(f"c{n}" for n in range(20))], ["shoes", "socks", "hat", "coat", "scarf"]
    rows = [f"{who},{things[(i + t) % 5]},{t}" for i, who in enumerate(people) for t in range(5)]
    Path("events.csv").write_text("\n".join(["customer,product,when", *rows]), encoding="utf-8")


BEFORE: dict[str, Callable[[], None]] = {
    "docs/howto/adapter.md": train_adapter,
    "docs/howto/fine-tune.md": lambda: train_language_model("runs/base"),
    "docs/howto/export.md": export_as_onnx,
    "docs/howto/train-on-text.md": train_language_model,
    "docs/language-models.md": train_language_model,
    "docs/recommendation.md": write_events,
}


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder and a cache of its own; rules registered and dtypes set by a page end with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRISM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prism.rules, "_REGISTERED", dict(prism.rules._REGISTERED))
    yield
    torch.set_default_dtype(torch.float32)


def _run(page: Path, before: Callable[[], None] | None = None) -> None:
    if before is not None:
        before()
    namespace = {"__name__": "__main__"}
    for number, (source, expected) in enumerate(blocks(page), 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, f"{page.name}, block {number}", "exec"), namespace)
        if expected:
            assert out.getvalue() == expected, f"{page.name}, block {number} prints something else than the page shows"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.is_file() and blocks(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    _run(page, BEFORE.get(page.relative_to(ROOT).as_posix()))


def test_a_block_that_fails_or_prints_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n", encoding="utf-8")
    _run(page)
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="block 1 prints something else"):
        _run(page)
    page.write_text("```python\nassert False\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        _run(page)


def _modules_with_examples() -> list[str]:
    source = ROOT / "src"
    found = [path for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in found]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_docstring_examples_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed


EXAMPLES = {
    "forms.py": "",
    "training_loop.py": "--steps 2",
    "swap_a_rule.py": "--steps 1 --rules linear prism*3+softmax",
    "stream.py": "--tokens 600 --segment 256",
    "recommend_pandas.py": "--users 30 --epochs 1",
    "own_rule.py": "",
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, *EXAMPLES[name].split()])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out
