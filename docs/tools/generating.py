"""Table of `benchmarks/generation.py`, from the results of one run in experiments/results/generation.json."""

from __future__ import annotations

import json
from pathlib import Path

from wording import joined, paragraph, table

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "generation.json"
SIZES = {"1M": "1 M", "30M": "30 M"}


def against_llama() -> str:
    """Tokens per second of PRISM and of a Llama of equal size, after short and long contexts."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for row in found["results"]:
        rates = row["tokens_per_second"]
        cells = [f"{rates[name]:,.0f}" for name in ("prism", "llama", "ordinary")]
        rows.append([f"{SIZES[row['size']]}, {row['context']:,} tokens", *cells, f"{row['over_llama']:.2f}"])
    header = ["parameters, context", "PRISM", "Llama", "PRISM, ordinary steps", "over Llama"]
    said = paragraph(
        f"Tokens per second on one thread of an {found['machine']['cpu']}, batch 1, float32, both through `model(token,",
        f"past_key_values=cache)`, one process (`{found['command']}`):",
    )
    return joined(said, table(header, rows))
