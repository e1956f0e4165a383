"""The demo's report, from made-up results: everything it shows is inside it, and it shows everything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from prism.lab.demo import TrainedModel, write_report

NAMES = ("PRISM, L = 2", "Gated DeltaNet", "linear attention")


def trained(number: int) -> TrainedModel:
    log: list[dict[str, Any]] = [
        {"step": step, "loss": 5.0 / step + number, "tokens_per_second": 1000.0 * (number + 1) + step}
        for step in range(1, 8)
    ]
    log += [{"step": step, "validation_bits_per_byte": 2.125 + number + 1 / step} for step in (4, 8)]
    return TrainedModel(
        name=NAMES[number],
        command=f"prism train lm --seed {number}",
        log=log,
        steps=8,
        tokens_per_step=1024,
        parameters=123_456 + number,
        state_bytes=7_890 + number,
        sample=f"f(a<b & c) -> '€' </pre><script>alert({number})</script>",
        sample_command=f"prism generate runs/{number}",
    )


RECALL = [
    {
        "setting": setting,
        "name": name,
        "seed": 0,
        "accuracy": 0.5 + 0.125 * i,
        "accuracy_by_pairs": {"2": 0.9, "4": 0.5 + 0.125 * i},
        "state_size": 1024,
        "steps": 600,
        "task": {"pairs": 4},
    }
    for setting in ("easy", "starved")
    for i, name in enumerate(("linear", "gated_delta"))
]


class Page(HTMLParser):
    """Tags that are open, what they refer to, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report(
        tmp_path_factory.mktemp("demo") / "new folder" / "report.html",
        [trained(i) for i in range(3)],
        RECALL,
        recall_command="prism probe mqar --output here",
        command="prism demo --minutes 5",
        prompt="def ",
        text="some text",
        seed=0,
        machine={"cpu": "A & B", "cores": 2, "python": "3", "torch": "2"},
        seconds=200.4,
    )
    return Path(path).read_text(encoding="utf-8")


def test_nothing_is_fetched(source: str) -> None:
    page = Page(source)
    assert page.open == []
    assert page.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "base", "form"})
    assert page.references == []
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", source)


def test_charts_take_their_colours_from_both_themes(source: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    assert sum('role="img"' in chart for chart in charts) == 4
    assert not any(re.search(r"#[0-9a-fA-F]{3,8}|rgb|white|black", chart) for chart in charts), "a colour of one theme"
    used = {name for chart in charts for name in re.findall(r'class="s(\d)"', chart)}
    light, _, rest = source.partition("@media (prefers-color-scheme: dark)")
    dark, _, _ = rest.partition("\n}\n")
    variables = set(re.findall(r"(--\w+):", light))
    assert variables == set(re.findall(r"(--\w+):", dark)) >= {f"--c{name}" for name in used}
    assert set(re.findall(r"var\((--\w+)\)", source)) <= variables
    assert "@media print" in source


def test_one_sentence_at_the_top_says_what_was_found(source: str) -> None:
    top = source[: source.index("<h2>")]
    finding = re.search(r'<p class="finding">(.*?)</p>', top)
    assert finding is not None
    assert finding[1].startswith("In this run PRISM, L = 2 predicts held-out text best: 2.250 bits per byte")
    assert "(Gated DeltaNet 3.250, linear attention 4.250)" in finding[1]
    assert "gated_delta recalls most: 62% of the answers in the starved setting (linear 50%)." in finding[1]


def test_every_figure_stands_beside_its_command_seed_and_budget(source: str) -> None:
    text = Page(source).text
    facts = [
        "200 seconds in all on A & B (2 cores)",
        "$ prism demo --minutes 5",
        "8 steps, 8,192 tokens each, seed 0",
        "$ prism probe mqar --output here",
        "Seed 0; 600 training steps.",
        "one seed",
    ]
    for i, name in enumerate(NAMES):
        facts += [name, f"$ prism train lm --seed {i}", f"$ prism generate runs/{i}"]
        facts += [f"{2.125 + i + 1 / 8:.3f}", f"{1004 + 1000 * i:,}", f"{123_456 + i:,}", f"{7_890 + i:,}"]
    for fact in facts:
        assert fact in text, fact


def test_samples_are_shown_as_they_are(source: str) -> None:
    assert "def f(a<b & c) -> '€' </pre><script>alert(0)</script>" in Page(source).text
