"""The demo's report, from made-up results: everything it shows is inside it, and it shows everything."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from prism.evaluate.demo import TrainedModel, write_report

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
        if tag not in ("meta", "img"):
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
    assert page.references
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in page.references)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", source)


def test_pictures_are_in_the_readers_colours(source: str) -> None:
    pictures = [base64.b64decode(reference.split(",", 1)[1]).decode() for reference in Page(source).references]
    assert len(pictures) == 2
    for picture in pictures:
        assert "currentColor" in picture
        assert "prefers-color-scheme:dark" in picture
        assert "#010203" not in picture
        assert not re.search(r'(href|src)="(?!#)', picture), "a picture refers to something outside"
        assert picture.startswith("<svg")


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
