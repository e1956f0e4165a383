"""The recommender's page in a real browser, against a real server with a small model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.browser import PHONE, Visit, chromium
from tests.serve.services import event, recommender, serving

KEY = "a-key-for-the-page"
HOSTILE = "<img src=x onerror=alert(1)>"


@contextmanager
def served(folder: Path, key: str | None = None) -> Iterator[str]:
    """A server with three users who have histories; yields its URL."""
    people = {"anna": range(1, 6), "ben": range(20, 25), "Zoe": range(30, 33)}
    history = [event(who, f"i{n}", n, "watch") for who, items in people.items() for n in items]
    with serving(recommender(), folder / "store.db", key=key) as client:
        assert client.post("/api/feedback", json=history).json() == {"RowAffected": len(history)}
        yield str(client.base_url).rstrip("/")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("open")) as url:
        yield url


def listed(visit: Visit) -> list[str]:
    return visit.texts("#next .name")


def pick(visit: Visit, user: str) -> None:
    """Search a user and take the first suggestion."""
    visit.page.fill("#user", user)
    visit.page.locator("#users [role=option]", has_text=user).first.click()
    visit.wait("name => document.querySelector('#past-title').innerText === name", user)


def click(visit: Visit, place: int) -> str:
    """Click a recommendation, wait for the new list, and return the item's name."""
    item = listed(visit)[place]
    visit.page.locator("#next .rec").nth(place).click()
    visit.wait("item => document.querySelector('#history li')?.dataset.item === item", item)
    return item


def test_search_a_user_click_and_the_list_changes(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    pick(visit, "anna")
    events, before = int(visit.texts("#facts dd")[0]), listed(visit)
    assert len(before) == 10
    item = click(visit, 2)
    after = listed(visit)
    assert after != before and item not in after and visit.texts("#next .moved")
    assert int(visit.texts("#facts dd")[0]) == events + 1
    stored = visit.page.request.get(f"{server}/api/user/anna").json()
    assert stored["Feedback"][0]["ItemId"] == item and stored["EventCount"] == events + 1
    assert item in visit.page.locator("#spoken").inner_text()
    # Why this: the nearest events of the history light up
    explained = visit.page.locator("#next .rec", has=visit.page.locator(".why")).first
    explained.hover()
    near = explained.locator(".why b").all_inner_texts()
    assert near and set(near) == {row.split("\n")[0] for row in visit.texts("#history li.close span:first-child")}
    # The address names the user
    visit.page.reload()
    visit.wait("() => document.querySelector('#past-title').innerText === 'anna'")
    assert visit.nameless() == []
    visit.wait("() => document.querySelector('#throughput .curve')?.getAttribute('d').includes('L')")
    assert "typical answer" in visit.page.locator("#tiles").inner_text()
    visit.close()


def test_a_visitor_without_an_account_leaves_nothing_behind(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    stored = visit.page.request.get(f"{server}/api/stats").json()["Events"]
    visit.wait("() => document.querySelectorAll('#next .rec').length === 10")
    popular = listed(visit)
    first = click(visit, 0)
    assert listed(visit) != popular and first not in listed(visit)
    assert set(visit.texts("#next .why b")) == {first}
    visit.page.get_by_label(f"Remove {first}").click()
    visit.wait("() => document.querySelector('#history .empty')")
    assert listed(visit) == popular
    visit.page.fill("#item", popular[3])
    visit.page.locator("#items [role=option]", has_text=popular[3]).click()
    visit.wait("item => document.querySelector('#history li')?.dataset.item === item", popular[3])
    asked = f"{server}/api/session/recommend?exclude-seen=false"
    expected = [one["Id"] for one in visit.page.request.post(asked, data=[event("", popular[3])]).json()]
    visit.page.check("#seen")
    names = "[...document.querySelectorAll('#next .name')].map((one) => one.innerText)"
    visit.wait(f"expected => JSON.stringify({names}) === JSON.stringify(expected)", expected)
    assert visit.page.request.get(f"{server}/api/stats").json()["Events"] == stored
    visit.close()


def test_the_keyboard_is_enough(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    visit.wait("() => document.querySelectorAll('#next .rec').length === 10")
    visit.tab_to("#user")
    visit.page.keyboard.type("zo")  # a capital letter is found too
    visit.wait("() => document.querySelector('#users li')?.innerText.startsWith('Zoe')")
    visit.press("Backspace", "Backspace")
    visit.page.keyboard.type("be")
    visit.wait("() => document.querySelector('#user').getAttribute('aria-activedescendant') === 'users-0'")
    visit.press("Escape")
    assert visit.page.get_attribute("#user", "aria-expanded") == "false"
    visit.press("ArrowDown")
    visit.wait("() => document.querySelector('#user').getAttribute('aria-expanded') === 'true'")
    visit.press("ArrowDown", "ArrowUp", "Enter")
    visit.wait("() => document.activeElement.matches('.rec')")
    assert visit.texts("#past-title") == ["ben"] and visit.focus()["seen"]
    visit.press("Tab")
    second = listed(visit)[1]
    visit.press("Enter")
    visit.wait("item => document.querySelector('#history li')?.dataset.item === item", second)
    # The focus stays at the second place, where another item stands now
    assert visit.page.evaluate("document.activeElement === document.querySelectorAll('.rec')[1]")
    visit.tab_to("#item")
    visit.tab_to("#history")
    visit.close()


def test_a_phone_shows_everything_in_readable_colours(browser: Any, server: str) -> None:
    visit = Visit(browser, server, PHONE, "dark", at="/#user=anna")
    visit.wait("() => document.querySelectorAll('#next .rec').length === 10 && document.querySelector('#tiles dd')")
    boxes = visit.page.evaluate(
        "[...document.querySelectorAll('#next .rec')].map((one) => one.getBoundingClientRect().toJSON())"
    )
    assert all(box["left"] >= 0 and box["right"] <= 360 and box["height"] >= 44 for box in boxes)
    assert visit.pale() == []
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = visit.page.evaluate(ground)
    visit.page.click("#theme")
    assert visit.page.evaluate(ground) != dark and visit.pale() == []
    visit.page.reload()
    visit.wait("() => document.querySelector('#next .rec')")
    assert visit.page.evaluate(ground) != dark, "the choice is remembered"
    visit.close()


def test_ids_are_text_whatever_they_contain(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    assert visit.page.request.post(f"{server}/api/feedback", data=[event(HOSTILE, HOSTILE)]).ok
    pick(visit, HOSTILE)
    assert visit.texts("#history li span:first-child") == [HOSTILE]
    assert "not known to the model" in visit.texts("#history li")[0]
    visit.page.click("#forget")
    assert HOSTILE in visit.page.locator("dialog").inner_text()
    visit.page.locator("dialog button[type=submit]").click()
    visit.wait("() => document.querySelector('#history .empty')")
    assert visit.page.locator("main img").count() == 0
    visit.close()


def test_a_server_that_is_gone_is_seen(browser: Any, server: str) -> None:
    visit = Visit(browser, server)
    visit.wait("() => document.querySelector('#tiles dd')")
    visit.page.route("**/api/**", lambda route: route.abort())
    visit.page.locator("#next .rec").first.click()
    visit.wait("() => document.querySelector('#message.shown')?.innerText.includes('does not answer')")
    visit.wait("() => !document.querySelector('#offline').hidden")
    visit.page.unroute("**/api/**")
    visit.wait("() => document.querySelector('#offline').hidden")
    visit.close(expected="ERR_FAILED")


def test_a_key_is_asked_for_and_kept_in_this_tab(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path, KEY) as url:
        visit = Visit(browser, url)
        visit.page.fill("#key", "wrong-wrong")
        visit.press("Enter")
        visit.wait("() => document.querySelector('dialog .wrong')")
        assert visit.page.locator("dialog").count() == 1 and listed(visit) == []
        visit.page.fill("#key", KEY)
        visit.press("Enter")
        visit.wait("() => document.querySelectorAll('#next .rec').length === 10")
        pick(visit, "anna")
        visit.page.reload()
        visit.wait("() => document.querySelector('#tiles dd')")
        assert visit.page.locator("dialog").count() == 0
        assert KEY not in str(visit.page.evaluate("JSON.stringify(localStorage)")) + "".join(visit.requests)
        visit.close(expected="401")


def test_docs_make_requests_with_the_key(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path, KEY) as url:
        visit = Visit(browser, url, at="/docs")
        visit.page.locator("button.authorize").first.click()
        visit.page.locator(".auth-container input").fill(KEY)
        visit.page.locator(".auth-btn-wrapper button.authorize").click()
        visit.page.locator("button.btn-done").click()
        visit.page.locator("#operations-users_and_items-stats_api_stats_get .opblock-summary-control").click()
        visit.page.locator("button.try-out__btn").click()
        visit.page.locator("button.execute").click()
        answer = visit.page.locator(".live-responses-table .response").first
        assert '"Users": 3' in answer.inner_text()
        visit.close()
