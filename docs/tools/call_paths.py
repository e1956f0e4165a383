"""Trace which files of src/prism run in one call, in order, and write them into docs/design.md.

    python docs/tools/call_paths.py            # writes the block of docs/design.md between the marks <!-- paths -->

A file counts if one of its functions runs in any thread; imports do not count. Every call was made once before it is traced,
so that caches are filled, as they are in use.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import prism

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(prism.__file__).parent
MARK = "<!-- paths -->\n"

_seen: dict[str, None] | None = None
"""The files that have run, in order, while a call is traced."""


def profile(frame: Any, event: str, _: Any) -> None:
    name = frame.f_code.co_filename
    if _seen is not None and event == "call" and name.startswith(str(SOURCE)) and frame.f_code.co_name != "<module>":
        _seen.setdefault(str(Path(name).relative_to(SOURCE)))


def files_of(call: Callable[[], Any]) -> list[str]:
    """The files of prism whose functions run in a call, in the order in which they first run."""
    global _seen
    call()
    _seen = {}
    try:
        call()
    finally:
        found, _seen = list(_seen), None
    return found


@contextmanager
def calls() -> Iterator[dict[str, Callable[[], Any]]]:
    """What is traced, each as one call."""
    from prism.models import PrismConfig, PrismForCausalLM
    from tests.serve.services import event, recommender, serving

    mixer = prism.Mixer("prism", width=64, heads=2)
    x, tokens = torch.randn(2, 70, 64), torch.randint(256, (2, 70))
    config = PrismConfig(hidden_size=64, num_heads=2, layers="prism*2")
    training, reading = PrismForCausalLM(config).train(), PrismForCausalLM(config).eval()
    with torch.no_grad():
        cache = reading(tokens, use_cache=True).past_key_values

    def token() -> None:
        with torch.no_grad():
            reading(tokens[:, :1], past_key_values=cache, use_cache=True)

    with tempfile.TemporaryDirectory() as folder, serving(recommender(), Path(folder) / "store.db") as client:
        client.post("/api/feedback", json=[event("anna", "i1", 1), event("anna", "i2", 2)]).raise_for_status()
        yield {
            "`prism.Mixer`, forward and backward": lambda: mixer(x)[0].sum().backward(),
            "a language model, forward and backward": lambda: training(tokens, labels=tokens).loss.backward(),
            "one token of a language model": token,
            "a recommendation over HTTP": lambda: client.get("/api/recommend/anna?n=5").raise_for_status(),
        }


def main() -> None:
    sys.path.insert(0, str(ROOT))  # tests.serve.services has a small recommender behind HTTP
    threading.setprofile(profile)
    sys.setprofile(profile)
    with calls() as traced:
        rows = [(name, files_of(call)) for name, call in traced.items()]
    lines = [f"| {name} | {len(files)} | {', '.join(f'`{file}`' for file in files)} |\n" for name, files in rows]
    table = "| call | files | in order |\n|---|--:|---|\n" + "".join(lines)
    page = ROOT / "docs" / "design.md"
    block = re.compile(f"{MARK}.*?{MARK}", re.DOTALL)
    text = block.sub(lambda _: f"{MARK}\n{table}\n{MARK}", page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
