"""What docs/howto/accelerate.md says of speed with and without `prism.accelerate`, on a CPU and on a GPU."""

from __future__ import annotations

import json
from typing import Any

from evidence import Evidence
from wording import joined, paragraph, table

BOTH, FORWARD, DECODE = "forward and backward", "forward", "decode 16"
MISSING = "Not measured yet."


def cpu(evidence: Evidence) -> str:
    """Times with `accelerate` over those without, by family, alone and beside a busy process."""
    alone = stored(evidence, "dropin")
    if alone is None:
        return MISSING
    lengths = sorted({row["tokens"] for row in alone["results"] if row["pass"] == FORWARD})
    columns = [(kind, tokens) for tokens in lengths for kind in (FORWARD, BOTH)] + [(DECODE, 1)]
    families = list(dict.fromkeys(row["family"] for row in alone["results"]))
    header = ["model", *[f"{kind} {tokens}" for kind, tokens in columns[:-1]], "one cached token"]
    rows = [[f"`{name}`", *[ratio(alone["results"], name, *column) for column in columns]] for name in families]
    about = alone["machine"]
    parts = [
        paragraph(
            "Time with `accelerate` over transformers' torch path without it, lower is faster: small models (four layers of",
            f"width 256, float32), batch 1, {alone['threads']} threads of a {about['cpu']},",
            f"torch {about['torch'].partition('+')[0]}, transformers {alone['transformers']}.",
        ),
        table([short(cell) for cell in header], rows),
    ]
    disturbed = stored(evidence, "dropin_busy")
    if disturbed is not None:
        longest, slowed = max(lengths), disturbed["results"]
        found = [
            f"`{name}` {ratio(slowed, name, FORWARD, longest)} and {ratio(slowed, name, BOTH, longest)}"
            for name in dict.fromkeys(row["family"] for row in slowed)
        ]
        parts.append(
            paragraph(
                f"With {disturbed['busy']} of the cores kept busy by another process, forward, and forward and backward, at",
                f"{longest} tokens: {', '.join(found)}.",
            )
        )
    return joined(*parts)


def gpu(evidence: Evidence) -> str:
    """Milliseconds of one layer of Qwen3.5, with flash-linear-attention and with ours."""
    found = stored(evidence, "dropin_gpu")
    if found is None:
        return MISSING
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in found["results"]:
        rows.setdefault((row["heads"], f"{row['batch']} × {row['tokens']}"), {})[row["pass"]] = row
    cells = [
        [heads, shape, *[cell for kind in (FORWARD, BOTH) for cell in milliseconds(passes[kind])]]
        for (heads, shape), passes in rows.items()
    ]
    header = ["heads of keys/values", "batch × tokens", "forward", "ratio", "and backward", "ratio"]
    where = found["machine"]
    return joined(
        paragraph(
            "One Gated DeltaNet layer of Qwen3.5 (heads of 128, bfloat16, its linear maps included), transformers with",
            f"flash-linear-attention → accelerated, in one process: {where['gpu']}, torch {where['torch'].partition('+')[0]},",
            f"transformers {found['transformers']}. The package causal_conv1d is not installed: transformers' convolution is",
            "torch's.",
        ),
        table(header, cells, left=2),
    )


def stored(evidence: Evidence, name: str) -> dict[str, Any] | None:
    """A file of results with its machine; None if there is none."""
    path = evidence.folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def ratio(rows: list[dict[str, Any]], family: str, kind: str, tokens: int) -> str:
    wanted = (family, kind, tokens)
    return next((f"{row['ratio']:.2f}" for row in rows if (row["family"], row["pass"], row["tokens"]) == wanted), "–")


def milliseconds(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['transformers']:.2f} → {row['prism']:.2f} ms", f"{row['ratio']:.2f}"


def short(header: str) -> str:
    return header.replace(f"{BOTH} ", "both ")
