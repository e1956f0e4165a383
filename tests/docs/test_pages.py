"""What pages say about the project is true: commands, flags, files, versions and the table of rules."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import prism
from prism.cli import COMMANDS, main
from prism.rules import parts

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_SHELL = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`((?:prism|python|make|torchrun) [^`]+)`")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tool(stem: str) -> ModuleType:
    """A module of docs/tools, which is no package."""
    spec = importlib.util.spec_from_file_location(stem, ROOT / "docs" / "tools" / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(text: str) -> list[str]:
    """Command lines of a page: shell blocks (continued lines joined, comments dropped) and inline code."""
    found = []
    for _, block in _SHELL.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            found += [part.strip() for part in re.split(r"\s*[|>&]\s+", re.sub(r"\s#.*", "", line))]
    return [*filter(None, found), *(match.strip() for match in _INLINE.findall(text.replace("\n", " ")))]


ALL = sorted({(name(page), line) for page in PAGES for line in commands(page.read_text(encoding="utf-8"))})


@cache
def flags(command: str) -> frozenset[str]:
    """The flags of `prism COMMAND`, read off its help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        main([*command.split(), "--help", *["all"] * COMMANDS[command].own_arguments])
    return frozenset(re.findall(r"--[a-z][\w.-]*", out.getvalue()))


def check_prism(words: list[str]) -> None:
    if not words or words[0].startswith(("-", "…", "COMMAND")):
        return
    command = next((c for n in (2, 1) if (c := " ".join(words[:n])) in COMMANDS), None)
    assert command is not None or any(c.split()[0] == words[0] for c in COMMANDS), f"no command prism {words[0]}"
    if command is not None:
        used = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help", "--import"}
        assert used <= flags(command), f"prism {command} has no {', '.join(sorted(used - flags(command)))}"


def check_python(words: list[str]) -> None:
    if not words or not words[0].endswith(".py"):
        return
    script = ROOT / words[0]
    assert script.is_file(), f"there is no {words[0]}"
    source = script.read_text(encoding="utf-8")
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        assert f'"{flag}"' in source, f"{words[0]} has no {flag}"


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    variables = re.findall(r"^(?:export )?(\w+) *[?:]?=", makefile, re.MULTILINE)
    for word in words:
        name, given, _ = word.partition("=")
        assert name in (variables if given else targets), f"the Makefile has no {name}"


CHECKS = {"prism": check_prism, "python": check_python, "make": check_make}


def check(line: str) -> None:
    words = shlex.split(line.replace("…", "x"))
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "prism":  # torchrun … -m prism train lm
        words = words[words.index("-m") + 1 :]
    if words and words[0] in CHECKS:
        CHECKS[words[0]](words[1:])


@pytest.mark.parametrize(("page", "line"), ALL)
def test_a_command_that_a_page_shows_exists(page: str, line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    "line",
    ["prism trane lm", "prism train lm --nosuch 1", "python benchmarks/no.py", "make nosuch", "make demo NOSUCH=1"],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        check(line)


_FILE = re.compile(r"`((?:src/prism|docs|tests|scripts|benchmarks|examples|experiments|engine|rules)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_file_that_a_page_names_exists(page: Path) -> None:
    named = set(_FILE.findall(page.read_text(encoding="utf-8")))
    gone = [path for path in named if not (ROOT / path).exists() and not (ROOT / "src" / "prism" / path).exists()]
    assert not [path for path in gone if not path.startswith("benchmarks/results/")]


def test_the_parts_of_rules_that_a_page_names_exist() -> None:
    text = (ROOT / "docs" / "howto" / "own-rule.md").read_text(encoding="utf-8").replace("\n", " ")
    named = re.search(r"`prism\.rules\.parts` has building blocks that do this correctly: ([^.]+)\.", text)
    assert named is not None
    names = re.findall(r"`(\w+)`", named[1])
    assert len(names) > 1 and not [part for part in names if not hasattr(parts, part)]


def _source_names() -> set[str]:
    folders = ("src", "benchmarks", "scripts", "examples", "experiments", "tests", "docs")
    return {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_module_that_a_page_names_exists(page: Path) -> None:
    """Where the folder is clear from the text, as in a table of files."""
    assert set(re.findall(r"`(\w+\.py)`", page.read_text(encoding="utf-8"))) <= _source_names()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_of_the_front_pages_lead_somewhere(page: Path) -> None:
    """The site's build checks those between pages."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]


def test_the_readme_shows_the_table_of_rules() -> None:
    made = tool("rule_table")
    assert made.README.read_text(encoding="utf-8") == made.page(), "run `python docs/tools/rule_table.py`"


def test_one_version() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None and cited[1] == prism.__version__
    assert f"## [{prism.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\nversion =" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


PAGE_OF_FIGURE = {"kernels": "kernels", "recommenders": "recommendation-results"}
"""Where the tables of a figure are, if not on the page of performance."""


def test_figures_stand_in_the_tables_too() -> None:
    """A picture or a claim, and the table with its figures, must not drift apart."""
    figures = json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8"))
    assert set(tool("figures").DRAW) <= set(figures)
    for figure, about in figures.items():
        page = PAGE_OF_FIGURE.get(figure, "performance")
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace(",", "")
        numbers = [number for row in about["rows"].values() for number in row if number not in (None, 1.0)]
        absent = [
            n for n in numbers if not {str(n), f"{n:.2f}", f"{n:.3f}", f"{abs(n):.4f}".lstrip("0")} & _numbers(text)
        ]
        assert not absent, f"docs/{page}.md does not have {absent} of {figure}"


def _numbers(text: str) -> set[str]:
    """Every number in a text, as it is written."""
    return set(re.findall(r"\d*\.?\d+", text))


@pytest.mark.parametrize("page", ["performance", "recommendation-results", "claims"])
def test_tables_of_results_are_written_from_stored_figures(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    outside = re.sub(r"<!-- claims:.*?<!-- end -->", "", text, flags=re.DOTALL)
    assert "\n|" not in outside, f"run `python docs/tools/tables.py docs/{page}.md`"


def test_stored_figures_can_be_measured_again() -> None:
    """Without raw results, a figure needs its machine and a command, which the page of a table shows."""
    stored = tool("tables").read()
    for about in [*json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8")).values(), *stored.values()]:
        assert about["machine"] and about["command"].startswith(("python ", "make "))
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    shown = {stem: [" ".join(line.split()) for line in commands(text)] for stem, text in pages.items()}
    for table, about in stored.items():
        page = next(stem for stem, text in pages.items() if f"<!-- claims:table-{table} -->" in text)
        assert about["command"] in shown[page], f"docs/{page}.md does not show the command of {table}"


def test_a_table_is_stored_and_written_back() -> None:
    tables = tool("tables")
    page = "# P\n\n## A part, here\n\n| a | b |\n|---|--:|\n| 1 | |\n\n```text\n| no | table |\n```\n\n| c |\n|---|\n| 2 |\n"
    stored: dict[str, object] = {"page-gone-1": {}, "other-1": {}}
    text = tables.adopt(page, "page", stored)
    assert list(stored) == ["other-1", "page-a-part-here-1", "page-a-part-here-2"]
    assert re.sub(r"<!-- .*? -->\n\n?", "", text).replace("|\n\n\n", "|\n\n") == page + "\n"
    assert tables.markdown(stored["page-a-part-here-1"]) == "| a | b |\n|---|--:|\n| 1 | |"
    again = dict(stored)
    assert tables.adopt(text, "page", again) == text and again == stored
    more = tables.adopt(text + "\n| d |\n|---|\n", "page", again)
    assert "claims:table-page-a-part-here-3" in more


def test_a_site_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    check_site = tool("check_site")
    (tmp_path / "index.html").write_text('<a href="https://arxiv.org">a</a><script src="a.js"></script>', "utf-8")
    assert check_site.outside(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://cdn.example/x.js"></script><link rel="stylesheet" href="//fonts.example/x.css">', "utf-8"
    )
    (tmp_path / "bad.css").write_text("@font-face { src: url(https://fonts.example/x.woff2) }", "utf-8")
    assert len(check_site.outside(tmp_path)) == 3


def test_the_check_of_archives_runs_the_readme_first_example() -> None:
    spec = importlib.util.spec_from_file_location("check_dist", ROOT / "scripts" / "check_dist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    example = module.first_example((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "prism.Mixer(" in example and "mixer.decode(" in example
    with pytest.raises(ValueError, match="no Python block"):
        module.first_example("no code")
