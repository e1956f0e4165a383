"""A real browser for tests of pages: what it shows, what it asks for, and what it complains about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser for a module of tests; skips them where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """One tab at a server's page. `close` fails if the page complained, or asked another host for something."""

    def __init__(
        self, browser: Any, url: str, viewport: dict[str, int] = DESK, scheme: str = "light", at: str = "/"
    ) -> None:
        self.url = url
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        self.context.set_default_timeout(15_000)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("console", lambda line: line.type in ("error", "warning") and self.complaints.append(line.text))
        self.page.goto(url + at)

    def close(self, expected: str = "") -> None:
        """End the visit; `expected`: part of the complaints that the test provoked."""
        scroll, width = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        self.context.close()
        assert scroll <= width, "the page scrolls sideways"
        assert [line for line in self.complaints if not expected or expected not in line] == []
        hosts = {urlsplit(asked).netloc for asked in self.requests if not asked.startswith("data:")}
        assert hosts == {urlsplit(self.url).netloc}

    def wait(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression holds."""
        self.page.wait_for_function(condition, arg=argument)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def focus(self) -> dict[str, Any]:
        """Where the focus is, and whether a reader sees it."""
        return self.page.evaluate(
            """() => {
                const at = document.activeElement, style = getComputedStyle(at);
                const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
                return {id: at.id, tag: at.tagName, text: at.innerText, seen};
            }"""
        )

    def tab_to(self, selector: str, most: int = 60) -> None:
        """Press Tab until the focus is on an element; every stop on the way must be visible."""
        for _ in range(most):
            self.press("Tab")
            assert self.focus()["seen"], f"no visible focus on {self.focus()}"
            if self.page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        raise AssertionError(f"Tab does not reach {selector}")

    def nameless(self) -> list[str]:
        """Controls without a name for screen readers."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll("button, input, textarea, a, [role=img], [role=listbox], section")]
                .filter((node) => !(node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") ||
                                    node.labels?.length || node.innerText?.trim() || node.hidden || !node.checkVisibility()))
                .map((node) => node.outerHTML.slice(0, 80))"""
        )

    def pale(self) -> list[str]:
        """Texts whose contrast is below 4.5 : 1 (WCAG AA; 3 : 1 for large ones), with the ratio."""
        return self.page.evaluate(CONTRAST)


CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, below) => top.slice(0, 3).map((value, i) => value * top[3] + below[i] * (1 - top[3])).concat(1);
    const light = (color) => {
        const [r, g, b] = color.map((value) => value / 255).map((v) => (v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4));
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const ground = (node) => {
        const layers = [];
        for (let at = node; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
        return layers.reverse().reduce((below, top) => over(top, below), rgba("white"));
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        const text = walker.currentNode.textContent.trim();
        if (!text || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        if (node.closest(".spoken, .skip, noscript, :disabled")) continue;
        const style = getComputedStyle(node);
        const back = ground(node);
        const ink = over(rgba(node.closest("svg") ? style.fill : style.color), back);
        const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
        const ratio = (high + .05) / (low + .05);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (large ? 3 : 4.5)) found.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    return found;
}"""
