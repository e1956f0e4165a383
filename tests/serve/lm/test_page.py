"""The curl lines of the how-to page run, against a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.lm.models import folder, serving

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "serve-lm.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(block for block in blocks if "curl" in block)
    requests = len(re.findall(r"\bcurl ", lines))
    with serving(folder(), store=tmp_path) as (http, service):
        lines = lines.replace("http://127.0.0.1:8000", str(http.base_url))
        paths = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # `python` is there
        bash = ["bash", "-euo", "pipefail", "-c", lines]
        done = subprocess.run(bash, capture_output=True, text=True, timeout=60, env=paths)
        assert done.returncode == 0, done.stderr
        counted = http.get("/metrics").text
    answered = re.findall(r'^prism_requests_total\{.*status="200"\} ([\d.]+)', counted, re.MULTILINE)
    assert sum(map(float, answered)) == requests >= 13
    assert len(service.states) == 3  # the fork, the stored one, the loaded one
    assert "data: [DONE]" in done.stdout and '"cached_tokens"' in done.stdout
