"""Where a language model loses its nats: by position in the document, and on repeated rare bigrams.

A prediction at time t reads x_1 … x_t of one document and gives the nats of y_t = x_{t+1}.

- Its position is t, the number of tokens it is predicted from. Positions are grouped in bins that end at powers of two:
  1, 2, 3-4, 5-8, 9-16, …
- It repeats a bigram if (x_s, y_s) = (x_t, y_t) for an s < t of the same document, inside what the model has read. The bigram
  is rare if the training data holds it at most `rare` times. A model cannot know such a pair from its weights, so the loss
  on repeated rare bigrams measures recall from the memory ("recall in the wild"). All other predictions are the rest.

Documents start at end tokens (see `prism.documents`); a sequence that starts inside a document counts from its first token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor

from prism.language.corpus import Corpus
from prism.language.tokens import Stream
from prism.models import PrismForCausalLM

RARE = 10
"""A bigram is rare if the training data holds it at most this many times."""
_AT_ONCE = 1 << 22
"""Training tokens that are counted at once."""
_LOGITS = 1 << 27
"""Logits that are computed at once."""


WANTED = {"logits_to_keep": 1, "output_hidden_states": True}
"""Arguments with which a model returns what `head_nats` needs."""


def head_logits(model: PrismForCausalLM, hidden: Tensor) -> Tensor:
    """Logits `[N, V]` in float32 of last hidden states `[N, D]`, with the precision of the training loss.

    Inputs are rounded as autocast does, sums are float32: a head in bfloat16 would round the logits too.
    """
    head, device = model.lm_head, hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    with torch.autocast(device, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.to(dtype).float(), head.weight.to(dtype).float(), bias)


@torch.no_grad()
def head_nats(model: PrismForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """Nats of every target `[B, T]`, float32, from the last hidden states `[B, T, D]`; 0 for targets of -100."""
    rows = max(1, _LOGITS // len(model.lm_head.weight))
    parts = zip(hidden.flatten(0, 1).split(rows), targets.to(hidden.device).flatten().split(rows), strict=True)
    nats = [F.cross_entropy(head_logits(model, part), answers, reduction="none") for part, answers in parts]
    return torch.cat(nats).view(targets.shape)


class History:
    """The part of a document that was read so far: its length and its bigrams.

    Args:
        end: the end token, which opens a document; None: there is only one document.
    """

    def __init__(self, end: int | None) -> None:
        self.end = end
        self.length = 0
        self.seen = np.empty(0, np.int64)

    def read(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, bigrams (as one number each) and whether each bigram occurred before, all `[T]`; then remember them."""
        time = np.arange(len(inputs))
        opens = np.zeros(len(inputs), bool) if self.end is None else inputs == self.end
        starts = np.maximum.accumulate(np.where(opens, time, -self.length))
        document = np.cumsum(opens)
        codes = bigrams(inputs, targets)
        # A stable sort by document and bigram: all but the first of equal ones are repetitions.
        order = np.lexsort((codes, document))
        same = (np.diff(codes[order]) == 0) & (np.diff(document[order]) == 0)
        repeats = np.zeros(len(inputs), bool)
        repeats[order[1:][same]] = True
        repeats |= (document == 0) & np.isin(codes, self.seen)
        last = document == document[-1]
        old = self.seen if document[-1] == 0 else self.seen[:0]
        self.seen = np.union1d(old, codes[last])
        self.length = int(time[-1] - starts[-1] + 1)
        return time - starts + 1, codes, repeats


def bigrams(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One number for each pair of tokens."""
    codes: np.ndarray = first.astype(np.int64) << 32 | second.astype(np.int64)
    return codes


def count_bigrams(stream: Stream, codes: np.ndarray) -> np.ndarray:
    """How often a stream of tokens holds each of these bigrams (sorted, each once), int64."""
    counts = np.zeros(len(codes), np.int64)
    if not len(codes):
        return counts
    for start in range(0, len(stream) - 1, _AT_ONCE):
        tokens = stream.read(start, min(start + _AT_ONCE + 1, len(stream)))
        found, times = np.unique(bigrams(tokens[:-1], tokens[1:]), return_counts=True)
        places = np.minimum(np.searchsorted(codes, found), len(codes) - 1)
        hit = codes[places] == found
        counts[places[hit]] += times[hit]
    return counts


def training_counts(corpus: Corpus, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The bigrams of a split, sorted, and how often the training data holds each; kept in the corpus's folder."""
    path = corpus.folder / f"bigrams-{split}-{corpus.manifest.digest[:12]}.npz"
    with FileLock(f"{path}.lock"):
        if not path.is_file():
            stream = corpus.stream(split)
            tokens = stream.read(0, len(stream))
            codes = np.unique(bigrams(tokens[:-1], tokens[1:]))
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, codes=codes, counts=count_bigrams(corpus.stream("train"), codes))
            os.replace(partial, path)
    with np.load(path) as held:
        return held["codes"], held["counts"]


@dataclass
class Sum:
    """Nats and number of some tokens."""

    nats: float = 0.0
    tokens: int = 0

    def result(self) -> dict[str, Any]:
        return {"nats_per_token": self.nats / self.tokens if self.tokens else None, "tokens": self.tokens}


@dataclass
class Breakdown:
    """Sums of nats by position, and of repeated bigrams, over any number of sequences."""

    nats: np.ndarray = field(default_factory=lambda: np.zeros(64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))
    repeated: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Bigrams and nats of the tokens that repeat one."""

    def add(self, history: History, inputs: np.ndarray, targets: np.ndarray, nats: np.ndarray, old: int = 0) -> None:
        """Count the predictions of a sequence `[T]`, all but the first `old`; `history` is of the tokens before it."""
        position, codes, repeats = (part[old:] for part in history.read(inputs, targets))
        nats = nats[old:].astype(np.float64)
        bins = np.frexp(position - 0.5)[1]  # (2^(n-1), 2^n] has n
        self.nats += np.bincount(bins, nats, minlength=64)
        self.tokens += np.bincount(bins, minlength=64)
        self.repeated.append((codes[repeats], nats[repeats]))

    @property
    def total(self) -> Sum:
        return Sum(float(self.nats.sum()), int(self.tokens.sum()))

    def positions(self) -> list[dict[str, Any]]:
        """One entry for each bin that holds tokens: the last position in it, mean nats, tokens."""
        return [
            {"up_to": 1 << n, "nats_per_token": float(self.nats[n] / self.tokens[n]), "tokens": int(self.tokens[n])}
            for n in range(64)
            if self.tokens[n]
        ]

    def repeated_bigrams(self) -> np.ndarray:
        """The bigrams that were repeated, sorted, each once."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *(codes for codes, _ in self.repeated)]))

    def rare_bigrams(self, codes: np.ndarray, counts: np.ndarray, rare: int = RARE) -> dict[str, Any]:
        """Loss on repeated rare bigrams and on all other tokens.

        Args:
            codes: bigrams, sorted; they contain the repeated ones.
            counts: how often the training data holds each.
            rare: at most this many times is rare.
        """
        hit = Sum()
        for found, nats in self.repeated:
            chosen = counts[np.searchsorted(codes, found)] <= rare
            hit = Sum(hit.nats + float(nats[chosen].sum()), hit.tokens + int(chosen.sum()))
        total = self.total
        rest = Sum(total.nats - hit.nats, total.tokens - hit.tokens)
        return {"rare": rare, "repeated_rare": hit.result(), "rest": rest.result()}
