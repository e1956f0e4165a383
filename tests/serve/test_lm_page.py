"""The language model's page in a real browser, against a real server with a small model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prism.serve.lm.app import lm_app
from prism.serve.lm.service import open_service
from prism.serve.lm.settings import LmSettings
from prism.serve.metrics import Metrics
from prism.serve.run import in_thread
from prism.serve.settings import ServerSettings
from tests.serve.browser import PHONE, Visit, chromium
from tests.tiny_lm import save_lm

KEY = "a-key-for-the-page"
IDLE = "() => document.querySelectorAll('.paper.writing').length === 0"
READY = "() => document.querySelector('#model').innerText !== ''"


@contextmanager
def served(model: Path, key: str | None = None, endless: bool = False) -> Iterator[str]:
    """A server with a small model, `endless`: which writes no end of a text; yields its URL."""
    settings = ServerSettings(port=0, api_key=key)
    service = open_service(model, LmSettings(device="cpu", max_tokens=10**6), Metrics("tokens"))
    if endless:
        service._ends = dict.fromkeys(service._ends, frozenset())
    with in_thread(lm_app(service, settings), settings) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(save_lm(tmp_path_factory.mktemp("model"))) as url:
        yield url


def start(visit: Visit, tokens: int = 12) -> None:
    """Wait for the page, and ask for so many tokens a turn."""
    visit.wait(READY)
    visit.page.evaluate("(most) => Object.assign(document.getElementById('most'), {max: most, value: most})", tokens)


def write(visit: Visit, text: str, branch: int = 0) -> str:
    """Send a text from the box of a branch, and return all that stands in the branch when the answer has ended."""
    box = visit.page.locator(".branch").nth(branch).locator("textarea")
    states = len(visit.texts("#states .size"))
    box.fill(text)
    box.press("Enter")
    visit.wait(f"states => ({IDLE})() && document.querySelectorAll('#states .size').length > states", states)
    return shown(visit, branch)


def shown(visit: Visit, branch: int = 0) -> str:
    return visit.page.evaluate(
        """(place) => [...document.querySelectorAll(".paper")[place].querySelectorAll("p > span:last-child")]
            .map((span) => span.textContent).join("")""",
        branch,
    )


def sizes(visit: Visit) -> list[str]:
    return visit.texts("#sizes dd")


def forget_all(visit: Visit) -> None:
    for state in visit.page.request.get(f"{visit.url}/v1/states").json()["data"]:
        visit.page.request.delete(f"{visit.url}/v1/states/{state['id']}")


def test_type_stream_and_fork(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    start(visit, 40)
    visit.page.evaluate(  # every length that the text had while it was written
        """() => { window.lengths = []; const paper = document.querySelector(".paper");
            new MutationObserver(() => window.lengths.push(paper.textContent.length))
                .observe(paper, {subtree: true, childList: true, characterData: true}); }"""
    )
    at_start = sizes(visit)
    text = write(visit, "In the evening")
    assert text.startswith("In the evening") and len(text) > len("In the evening")
    lengths = visit.page.evaluate("window.lengths")
    assert len(set(lengths)) > 5, "the text came in pieces"
    # The state keeps its size, the picture of the cache grows
    assert sizes(visit)[0] == at_start[0] and sizes(visit)[1] != at_start[1]
    stored = visit.page.request.get(f"{server}/v1/states").json()["data"]
    assert len(stored) == 1 and f"{stored[0]['tokens']} tokens" in visit.texts("#states .size")[0]
    assert f"{stored[0]['tokens']} tokens" in visit.texts(".title .quiet")[0]
    # Fork: two branches with the same text, which then part
    visit.page.get_by_role("button", name="Fork").click()
    visit.wait(
        "() => document.querySelectorAll('.branch').length === 2 && document.querySelectorAll('#states .size').length === 2"
    )
    assert shown(visit, 1) == text
    assert write(visit, " One", 0).startswith(text + " One") and shown(visit, 1) == text
    assert write(visit, " Two", 1).startswith(text + " Two") and " Two" not in shown(visit, 0)[len(text) :]
    stored = visit.page.request.get(f"{server}/v1/states").json()["data"]
    assert len(stored) == 4 and len({state["bytes"] for state in stored}) == 1
    assert sorted(visit.texts("#states .letter")) == ["A", "B"] and visit.nameless() == []
    # Those in use stay when the rest is deleted
    visit.page.click("#tidy")
    visit.wait("() => document.querySelectorAll('#states .size').length === 2")
    assert len(visit.page.request.get(f"{server}/v1/states").json()["data"]) == 2
    # A state that is opened after the page has forgotten the text still knows it
    visit.page.reload()
    start(visit)
    visit.page.locator("#states li", has_text="token").first.get_by_text("Open").click()
    visit.wait("() => document.querySelector('.earlier')")
    assert write(visit, " Three").startswith(" Three")
    for button in visit.page.locator("#states .danger").all()[::-1]:
        button.click()
    visit.wait("() => document.querySelector('#states .empty')")
    assert visit.page.request.get(f"{server}/v1/states").json()["data"] == []
    visit.close()


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[str]:
    with served(save_lm(tmp_path), endless=True) as url:
        yield url


def test_the_keyboard_is_enough_and_escape_stops(browser: Any, endless: str) -> None:
    server = endless  # so that nothing but Escape ends the text, however slow the browser
    visit = Visit(browser, server)
    start(visit, 10**6)
    assert visit.focus()["tag"] == "TEXTAREA" and visit.focus()["seen"]
    visit.page.keyboard.type("Once")
    visit.press("Shift+Enter")
    visit.page.keyboard.type("upon")
    visit.press("Enter")
    visit.wait("() => document.querySelector('.paper .model')?.textContent.length > 20")
    visit.press("Escape")
    visit.wait(IDLE)
    stopped = shown(visit)
    assert stopped.startswith("Once\nupon") and len(stopped) > 15
    visit.page.wait_for_function("() => document.querySelector('#spoken').innerText === 'Stopped.'")
    # What was stopped is read again with the next text: nothing is lost
    visit.page.evaluate("document.getElementById('most').value = 8")
    assert write(visit, " and").startswith(stopped + " and")
    tokens = visit.page.request.get(f"{server}/v1/states").json()["data"][-1]["tokens"]
    assert tokens >= len(stopped.split())
    visit.page.keyboard.press("Shift+Tab")
    visit.press("Tab")
    visit.tab_to(".composer button.primary")
    visit.press("Enter")  # Continue, without a text
    visit.wait("() => document.querySelectorAll('.paper .model').length === 3")
    visit.wait(IDLE)
    visit.tab_to("#settings summary")
    visit.press("Enter", "Tab")
    assert visit.focus()["id"] == "temperature"
    forget_all(visit)
    visit.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_one_branch_at_a_time_in_readable_colours(browser: Any, server: str, scheme: str) -> None:
    visit = Visit(browser, server, PHONE, scheme)
    start(visit)
    write(visit, "The <b>harbour</b>")
    assert visit.page.locator(".paper b").count() == 0 and "<b>harbour</b>" in shown(visit)
    visit.page.get_by_role("button", name="Fork").click()
    visit.wait(
        "() => document.querySelectorAll('.branch').length === 2 && document.querySelectorAll('#states .size').length === 2"
    )
    visible = "[...document.querySelectorAll('.branch')].map((one) => one.checkVisibility())"
    assert visit.page.evaluate(visible) == [False, True]
    visit.page.locator("#switch button").first.click()
    assert visit.page.evaluate(visible) == [True, False]
    assert visit.pale() == [] and visit.nameless() == []
    visit.page.get_by_label("Close branch A").click()
    visit.wait("() => document.querySelectorAll('.branch').length === 1")
    forget_all(visit)
    visit.close()


def test_a_refused_request_is_explained_and_the_text_returns(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    start(visit)
    answer = {"error": {"message": "the model is <i>busy</i>", "type": "unavailable_error"}}
    visit.page.route("**/v1/completions", lambda route: route.fulfill(status=503, json=answer))
    box = visit.page.locator("textarea")
    box.fill("Hello")
    box.press("Enter")
    visit.wait("() => document.querySelector('#message.shown')?.innerText === 'the model is <i>busy</i>'")
    assert box.input_value() == "Hello" and shown(visit) == ""
    visit.close(expected="503")


def test_a_key_is_asked_for(browser: Any, tmp_path: Path) -> None:
    with served(save_lm(tmp_path), KEY) as url:
        visit = Visit(browser, url)
        visit.page.fill("#key", KEY)
        visit.press("Enter")
        start(visit)
        assert write(visit, "Once").startswith("Once")
        visit.close(expected="401")
