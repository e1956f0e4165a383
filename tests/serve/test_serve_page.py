"""Every curl line of docs/howto/serve.md works, and answers what the page shows; so does its Python."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serve.services import recommender, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8087"
BLOCK = re.compile(r"^```sh\n(.*?)^```$(?:\n\n```json\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(curl command, the answer that the page shows or "")."""
    return [
        (command.strip(), shown.strip())
        for block, shown in BLOCK.findall(PAGE)
        for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE)
        if command.startswith("curl ")
    ]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_of_the_page_work(tmp_path: Path) -> None:
    assert len(commands()) >= 12
    with serving(recommender(), tmp_path / "s.db") as client:
        for command, shown in commands():
            line = command.replace(ADDRESS, str(client.base_url).rstrip("/")).replace(
                "curl ", "curl -sS --fail-with-body ", 1
            )
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            if shown:
                assert done.stdout == shown, command
            elif "metrics" not in command and " -i " not in command:
                assert json.loads(done.stdout) is not None


def test_the_function_of_the_page_posts_old_events(tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    exec(compile(source, "serve.md", "exec"), found)
    rows = [f"c{n % 700},i{n % 9},{1_700_000_000 + n}" for n in reversed(range(6000))]
    (tmp_path / "events.csv").write_text("\n".join(["customer,item,time", *rows]))
    with serving(recommender(), tmp_path / "s.db") as client:
        post = [tmp_path / "events.csv", str(client.base_url).rstrip("/"), "customer"]
        assert found["post_events"](*post) == 6000
        assert found["post_events"](*post) == 0
        assert client.get("/api/stats").json()["Events"] == 6000
