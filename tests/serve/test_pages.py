"""The files of the pages: complete, from this server only, sent with headers that forbid everything else."""

from __future__ import annotations

import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from prism.serve.pages import POLICY, add_pages, page_files

FILES = {name: content.decode() for name, content in page_files().items()}
TEXTS = {name: text for name, text in FILES.items() if not name.endswith(".svg") and "swagger" not in name}


def client(page: str) -> TestClient:
    app = FastAPI()
    add_pages(app, page)  # type: ignore[arg-type]
    return TestClient(app)


@pytest.mark.parametrize(("page", "title"), [("rec", "PRISM recommender"), ("lm", "PRISM language model")])
def test_the_page_and_all_it_loads_are_there(page: str, title: str) -> None:
    web = client(page)
    html = web.get("/")
    assert f"<title>{title}</title>" in html.text and html.headers["content-type"].startswith("text/html")
    waiting, loaded = set(re.findall(r'(?:src|href)="(/pages/[^"]+)"', html.text)), set()
    while waiting:
        path = waiting.pop()
        answer = web.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith(("text/javascript", "text/css", "image/svg+xml")), path
        loaded.add(path)
        waiting |= {f"/pages/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)} - loaded
    assert f"/pages/{page}.js" in loaded and "/pages/common.js" in loaded


def test_answers_carry_the_policy() -> None:
    web = client("rec")
    for path in ("/", "/pages/rec.js", "/pages/icon.svg"):
        headers = web.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY


def test_a_file_is_sent_once() -> None:
    web = client("lm")
    first = web.get("/pages/lm.js")
    again = web.get("/pages/lm.js", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert web.get("/pages/base.css", headers={"If-None-Match": first.headers["etag"]}).status_code == 200
    assert web.head("/").status_code == 200


@pytest.mark.parametrize(
    "name", ["__init__.py", "..%2Fapp.py", "%2e%2e/app.py", "gone.js", "..%2f..%2f..%2fetc%2fpasswd"]
)
def test_other_files_are_not_sent(name: str) -> None:
    answer = client("rec").get(f"/pages/{name}")
    assert answer.status_code == 404 and "import" not in answer.text


def test_pages_are_not_part_of_the_api() -> None:
    assert client("rec").app.openapi()["paths"] == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_files_need_no_other_host_and_make_no_html_of_text(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"|<script>", text)
    assert len(text.splitlines()) <= 400
