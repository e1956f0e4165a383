"""Photograph the pages of `prism serve`: train two small models on invented data, serve them, and use them in a browser.

    python docs/tools/serve_pictures.py            # docs/images/serve-*.png; about ten minutes on 2 cores

Needs the extra `serve`, playwright and Debian's chromium. Models are kept in `--folder`, so a second run is short.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import polars as pl
from invented import PEOPLE, stories, watched
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from prism import Recommender
from prism.cli import main as prism

IMAGES = Path(__file__).parents[1] / "images"
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 780}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
LOAD_SECONDS = 125
"""A little more than the graphs show."""


def train_recommender(folder: Path) -> None:
    """A recommender that knows which films come after which."""
    dice = random.Random(0)
    rows = [(f"u{u}", film, t) for u in range(1500) for t, film in enumerate(watched(dice.randint(8, 30), 1000 + u))]
    events = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    model = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 1}
    Recommender.fit(events, out=folder, epochs=8, model=model, report=False, device="cpu")


def train_language_model(folder: Path) -> None:
    """A language model that continues stories."""
    source = folder.with_suffix(".jsonl")
    source.write_text("\n".join(json.dumps({"text": text}) for text in stories(1500)), encoding="utf-8")
    size = (
        "--data.tokenizer bpe --data.bpe-size 600 --data.context 128 --model.num-hidden-layers 3 --model.hidden-size 96"
    )
    if prism(f"train lm --data.sources {source} --out {folder} --steps 200 --device cpu {size}".split()):
        raise SystemExit("training failed")


@contextmanager
def served(*command: str) -> Iterator[str]:
    """`prism serve …` on a free port, until the block ends; yields its URL."""
    words = [sys.executable, "-m", "prism", "serve", *command, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://[\d.]+:\d+", line):
                break
            print(line, end="")
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # an unread pipe would stop the server
        while True:
            try:
                httpx.get(f"{found.group()}/api/health/ready").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield found.group()
    finally:
        process.terminate()
        process.wait()


def fill_store(url: str) -> None:
    """Histories of the last weeks for everyone."""
    now = datetime.now(UTC)
    for number, name in enumerate(PEOPLE):
        films = watched(12 + 5 * number % 23, number)
        hours = sorted(random.Random(number).sample(range(3, 900), len(films)), reverse=True)
        times = [(now - timedelta(hours=ago, minutes=17 * number % 60)).isoformat() for ago in hours]
        events = [
            {"FeedbackType": "watch", "UserId": name, "ItemId": film, "Timestamp": at}
            for film, at in zip(films, times, strict=True)
        ]
        httpx.post(f"{url}/api/feedback", json=events).raise_for_status()


def send_events(url: str, seconds: float) -> None:
    """Visitors who watch films and ask for the next ones, more and fewer of them in turn."""
    end = time.monotonic() + seconds
    numbers = itertools.count(5000)

    def visitor() -> None:
        with httpx.Client(base_url=url, timeout=30) as web:
            while time.monotonic() < end:
                number = next(numbers)
                for film in watched(20, number):
                    event = {"FeedbackType": "watch", "UserId": f"visitor-{number}", "ItemId": film}
                    web.post("/api/feedback", json=[event]).raise_for_status()
                    web.get(f"/api/recommend/visitor-{number}").raise_for_status()
                    wave = 1.5 + random.random() + (end - time.monotonic()) % 40 / 25
                    time.sleep(0.04 * wave)
                    if time.monotonic() > end:
                        return

    threads = [threading.Thread(target=visitor) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def photograph(page: Page, name: str, **options: Any) -> None:
    """Save what the page shows, in 256 colours, none more than a few steps from the true one."""
    picture = Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    path = IMAGES / f"serve-{name}.png"
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} KB")


@contextmanager
def tab(browser: Browser, url: str, viewport: dict[str, int], scheme: str = "light") -> Iterator[Page]:
    context = browser.new_context(
        viewport=viewport,  # type: ignore[arg-type]
        color_scheme=scheme,  # type: ignore[arg-type]
        device_scale_factor=1.5 if viewport is DESK else 2,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_function("() => document.querySelector('#model').innerText !== ''")
    page.wait_for_timeout(600)
    yield page
    context.close()


def recommender_pictures(browser: Browser, url: str) -> None:
    fill_store(url)
    print(f"sending events for {LOAD_SECONDS} s …")
    load = threading.Thread(target=send_events, args=(url, LOAD_SECONDS + 12))
    load.start()
    time.sleep(LOAD_SECONDS)
    with tab(browser, f"{url}/#user=carla", DESK) as page:
        page.locator(".rec").nth(3).click()
        page.wait_for_selector(".moved")
        page.locator(".rec").nth(1).hover()
        page.wait_for_timeout(2500)
        photograph(page, "rec", full_page=True)
    with tab(browser, f"{url}/#user=felix", DESK, "dark") as page:
        page.locator(".rec").nth(2).click()
        page.wait_for_selector(".moved")
        page.locator(".rec").nth(0).hover()
        page.wait_for_timeout(1000)
        photograph(page, "rec-dark", full_page=True)
    with tab(browser, f"{url}/#user=greta", PHONE) as page:
        page.locator(".rec").nth(1).click()
        page.wait_for_selector(".moved")
        page.wait_for_timeout(500)
        photograph(page, "rec-phone")
    load.join()


def write(page: Page, text: str, branch: int, tokens: int, seed: int) -> None:
    """Send a text from a branch, and wait until the answer is there."""
    set_value = "([id, value]) => (document.getElementById(id).value = value)"
    page.evaluate(set_value, ["most", tokens])
    page.evaluate(set_value, ["seed", seed])
    states = page.locator("#states .size").count()
    box = page.locator(".branch").nth(branch).locator("textarea")
    box.fill(text)
    box.press("Enter")
    page.wait_for_function(
        "count => document.querySelectorAll('#states .size').length > count", arg=states, timeout=120_000
    )


def language_model_pictures(browser: Browser, url: str) -> None:
    with tab(browser, url, DESK) as page:
        write(page, "At dawn the fog lay low over the water, and the keeper", 0, 90, 3)
        page.get_by_role("button", name="Fork").click()
        page.wait_for_function("() => document.querySelectorAll('.branch').length === 2")
        page.wait_for_timeout(400)
        write(page, "\n\nLate at night", 0, 110, 4)
        write(page, "\n\nOn the first day of spring", 1, 130, 8)
        page.evaluate("document.activeElement.blur()")
        page.mouse.move(5, 500)
        page.wait_for_timeout(5000)  # the message goes, the graph comes
        photograph(page, "lm")
    with tab(browser, url, PHONE, "dark") as page:
        write(page, "After the storm the rain had stopped", 0, 60, 5)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(300)
        page.evaluate("scrollTo(0, 0)")
        photograph(page, "lm-phone")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/serve-pictures"), help="where models are kept")
    parser.add_argument("--only", choices=["rec", "lm"], help="pictures of one page only")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PRISM_CACHE", str(options.folder / "cache"))
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    films, tales = options.folder / "films", options.folder / "stories"
    for run, train, kind in ((films, train_recommender, "rec"), (tales, train_language_model, "lm")):
        if options.only in (kind, None) and not (run / "model").is_dir():
            train(run)
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as scratch:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        if options.only != "lm":
            with served("rec", str(films), "--store", f"{scratch}/store.db") as url:
                recommender_pictures(browser, url)
        if options.only != "rec":
            with served("lm", str(tales)) as url:
                language_model_pictures(browser, url)
        browser.close()


if __name__ == "__main__":
    main()
