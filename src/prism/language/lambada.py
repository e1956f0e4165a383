"""LAMBADA: predict the last word of a passage that makes sense only as a whole.

The last word is what follows the last space of the passage; the model reads an end token (which opens a document) and the
passage before that space. The answer is right if every token of " word" is the most likely one. Rows are given as a jsonl
file with the field `text`; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prism.language import text
from prism.language.breakdown import WANTED, head_logits
from prism.language.tokenizer import Tokenizer
from prism.models import PrismForCausalLM


def read_passages(path: Path, limit: int | None = None) -> list[str]:
    """The passages of a jsonl file (also .gz and .xz)."""
    passages = ["".join(document).rstrip() for document in text.documents(path)][:limit]
    for number, passage in enumerate(passages, 1):
        if " " not in passage.strip():
            raise ValueError(f"{path}, row {number} has no last word after a space: {passage[:40]!r}")
    if not passages:
        raise ValueError(f"there is no passage in {path}")
    return passages


@torch.no_grad()
def lambada(
    model: PrismForCausalLM, tokenizer: Tokenizer, passages: Sequence[str], batch: int = 32, longest: int = 1024
) -> dict[str, Any]:
    """Accuracy on the last words, its standard error, and their perplexity (per word).

    Args:
        batch: passages per forward pass.
        longest: tokens of a passage that are read; longer ones lose their beginning.
    """
    cuts = [passage.rindex(" ") for passage in passages]
    starts = tokenizer.encode([passage[:cut] for passage, cut in zip(passages, cuts, strict=True)])
    words = tokenizer.encode([passage[cut:] for passage, cut in zip(passages, cuts, strict=True)])
    rows = [(_opened(start, tokenizer.end, longest), word) for start, word in zip(starts, words, strict=True)]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))  # rows of a batch are about equally long
    right, nats = 0, 0.0
    for first in range(0, len(rows), batch):
        hits, losses = _answer(model, rows[first : first + batch], tokenizer.end)
        right, nats = right + hits, nats + losses
    accuracy = right / len(rows)
    return {
        "accuracy": accuracy,
        "accuracy_stderr": math.sqrt(accuracy * (1 - accuracy) / max(1, len(rows) - 1)),
        "word_perplexity": math.exp(min(nats / len(rows), 700.0)),
        "rows": len(rows),
    }


def _opened(tokens: np.ndarray, end: int, longest: int) -> np.ndarray:
    """The end token and the last tokens of a passage."""
    return np.concatenate([[end], tokens[-longest:]]).astype(np.int64)


def _answer(model: PrismForCausalLM, rows: list[tuple[np.ndarray, np.ndarray]], end: int) -> tuple[int, float]:
    """How many words are right, and the summed nats of all words. Padding is on the right, where no token sees it."""
    width = max(len(start) + len(word) for start, word in rows) - 1
    inputs = torch.full((len(rows), width), end)
    for number, (start, word) in enumerate(rows):
        whole = np.concatenate([start, word])[:-1]
        inputs[number, : len(whole)] = torch.from_numpy(whole)
    hidden = model(inputs.to(model.device), use_cache=False, **WANTED).hidden_states[-1]
    places = [(number, len(start) - 1 + i) for number, (start, word) in enumerate(rows) for i in range(len(word))]
    which, when = (torch.tensor(part, device=hidden.device) for part in zip(*places, strict=True))
    logits = head_logits(model, hidden[which, when])
    answers = torch.from_numpy(np.concatenate([word for _, word in rows]).astype(np.int64)).to(hidden.device)
    nats = float(torch.nn.functional.cross_entropy(logits, answers, reduction="sum"))
    wrong = torch.zeros(len(rows), dtype=torch.bool, device=hidden.device)
    wrong[which[logits.argmax(-1) != answers]] = True
    return len(rows) - int(wrong.sum()), nats
