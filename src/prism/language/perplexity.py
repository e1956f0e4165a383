"""Measure how well a model predicts files of text: nats per token, perplexity per token and per word, bits per byte.

The tokens of a file are one stream: an end token, a document, an end token, the next document, …, an end token. Every
token but the first is predicted and counted, ends of documents included. Documents start where they do in training (see
`prism.documents`), and none depends on another. What a token is predicted from is a choice (`Context`):

- its whole document, read in segments that pass the state on: exact for any length, in constant memory if the state is
  of fixed size;
- at most `context` tokens: sequences of that length that start every `stride` tokens without a state; each token is
  counted once, in the first sequence that contains it. This is how models with a limited context are compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prism.documents import document_starts, needed_starts
from prism.language import text
from prism.language.breakdown import WANTED, Breakdown, History, head_nats
from prism.language.generate import SEGMENT, LanguageModel, Reader
from prism.models.cross_entropy import IGNORED


@dataclass(frozen=True)
class Score:
    """A mean loss in several units; bits per byte and perplexity per word can be compared across tokenizers."""

    nats: float
    """Mean per token."""
    bytes_per_token: float
    words_per_token: float | None = None
    """None: not counted."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))

    @property
    def perplexity_per_word(self) -> float | None:
        """Of words between white space, as papers on WikiText report it; None if there are none."""
        return math.exp(min(self.nats / self.words_per_token, 700.0)) if self.words_per_token else None

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes_per_token


@dataclass(frozen=True)
class Context:
    """What a token is predicted from."""

    context: int | None = None
    """At most this many tokens; None: the whole document."""
    stride: int | None = None
    """Tokens between the starts of two sequences; None: `context`."""
    segment: int = SEGMENT
    """Tokens per forward pass where the state is passed on. Affects memory and speed, not the result."""
    batch: int = 8
    """Sequences per forward pass."""

    def __post_init__(self) -> None:
        for name in ("context", "stride", "segment", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.stride is not None and (self.context is None or self.stride > self.context):
            raise ValueError(f"stride is {self.stride}: it needs a context of at least that many tokens")


@dataclass
class Tally:
    """Sums over the predicted tokens."""

    nats: float = 0.0
    tokens: int = 0
    text_bytes: int = 0
    documents: int = 0
    words: int = 0

    def add(self, other: Tally) -> None:
        self.nats += other.nats
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.words += other.words
        self.documents += other.documents

    def result(self) -> dict[str, Any]:
        """Means and counts, for tables and JSON."""
        score = Score(self.nats / self.tokens, self.text_bytes / self.tokens, self.words / self.tokens)
        return {
            "nats_per_token": score.nats,
            "perplexity": score.perplexity,
            "perplexity_per_word": score.perplexity_per_word,
            "bits_per_byte": score.bits_per_byte,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "words": self.words,
            "documents": self.documents,
        }


def count_bytes(path: Path, column: str = "text") -> int:
    """UTF-8 bytes of the text in a file. Reads all of it, so errors in the file are raised before any prediction."""
    count = sum(len(piece.encode()) for document in text.documents(path, column) for piece in document)
    if not count:
        raise ValueError(f"there is no text in {path}")
    return count


def score_file(
    lm: LanguageModel,
    path: Path,
    how: Context | None = None,
    column: str = "text",
    report: Callable[[Tally, _Stream], None] = lambda tally, stream: None,
    breakdown: Breakdown | None = None,
) -> Tally:
    """Score a file; `report(tally so far, stream)` is called after every forward pass.

    Args:
        breakdown: counts every token too, by position and bigram.
    """
    how = Context() if how is None else how
    stream, tally = _Stream(lm, text.documents(path, column)), Tally()
    read = _through_state if how.context is None else _in_contexts
    for nats, tokens in read(lm, stream, how, breakdown):
        tally.nats += nats
        tally.tokens += tokens
        report(tally, stream)
    tally.text_bytes, tally.documents, tally.words = stream.text_bytes, stream.documents, stream.words
    return tally


@dataclass
class _Stream:
    """The tokens of documents, in pieces; counts what has been read."""

    lm: LanguageModel
    source: Iterable[text.Document]
    documents: int = 0
    text_bytes: int = 0
    tokens: int = field(default=0)
    words: int = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        tokenizer = self.lm.tokenizer
        end = np.array([tokenizer.end])
        yield end
        for document in self.source:
            empty = True
            for piece in document:
                if piece:
                    (tokens,) = tokenizer.encode([piece])
                    self.text_bytes += len(piece.encode())
                    self.tokens += len(tokens)
                    self.words += len(piece.split())  # pieces end with a line, so none cuts a word
                    empty = False
                    yield tokens
            if not empty:
                self.documents += 1
                self.tokens += 1
                yield end


def _pieces(stream: Iterable[np.ndarray], length: int, stride: int) -> Iterator[tuple[Tensor, int]]:
    """Sequences of up to `length` tokens plus the next one, one every `stride` tokens.

    With each: how many of its predicted tokens an earlier sequence has already counted.
    """
    held: deque[np.ndarray] = deque()
    buffer, old = np.empty(0, np.int64), 0
    for tokens in stream:
        held.append(tokens)
        if len(buffer) + sum(map(len, held)) <= length:
            continue
        buffer = np.concatenate([buffer, *held]).astype(np.int64)
        held.clear()
        start = 0
        while start + length < len(buffer):
            yield torch.from_numpy(buffer[start : start + length + 1]), old
            start, old = start + stride, length - stride
        buffer = buffer[start:]
    rest = np.concatenate([buffer, *held]).astype(np.int64)
    if len(rest) - 1 > old:
        yield torch.from_numpy(rest), old


def _through_state(
    lm: LanguageModel, stream: _Stream, how: Context, breakdown: Breakdown | None
) -> Iterator[tuple[float, int]]:
    """(nats, tokens) of each segment; the state is passed from one to the next."""
    reader, history = Reader(lm.model, lm.tokenizer.end), History(lm.tokenizer.end)
    for piece, _ in _pieces(stream, how.segment, how.segment):
        inputs, targets = piece[:-1], piece[1:]
        out: Any = reader.forward(inputs, **(_summed(targets[None]) if breakdown is None else WANTED))
        if breakdown is None:
            yield float(out.loss), len(targets)
        else:
            nats = head_nats(lm.model, out.hidden_states[-1], targets[None])[0].cpu().numpy()
            breakdown.add(history, inputs.numpy(), targets.numpy(), nats)
            yield float(nats.sum(dtype=np.float64)), len(targets)


@torch.no_grad()
def _in_contexts(
    lm: LanguageModel, stream: _Stream, how: Context, breakdown: Breakdown | None
) -> Iterator[tuple[float, int]]:
    """(nats, tokens) of each batch of sequences without a state."""
    length, end = how.context or 0, lm.tokenizer.end
    for group in _batches(_pieces(stream, length, how.stride or length), how.batch):
        tokens = torch.stack([piece for piece, _ in group])
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        for row, (_, old) in enumerate(group):
            targets[row, :old] = IGNORED
        reset = needed_starts(document_starts(inputs, end), fresh=True)
        reset = None if reset is None else reset.to(lm.device)
        more = _summed(targets) if breakdown is None else WANTED
        out = lm.model(inputs.to(lm.device), reset=reset, use_cache=False, **more)
        if breakdown is None:
            yield float(out.loss), int((targets != IGNORED).sum())
            continue
        nats = head_nats(lm.model, out.hidden_states[-1], targets).cpu().numpy()  # those ignored are 0
        for (piece, old), losses in zip(group, nats, strict=True):
            whole = piece.numpy()
            breakdown.add(History(end), whole[:-1], whole[1:], losses, old)
        yield float(nats.sum(dtype=np.float64)), int((targets != IGNORED).sum())


def _summed(targets: Tensor) -> dict[str, Any]:
    """Arguments with which a model returns the summed loss of these next tokens `[B, T]`, and no logits."""
    return {"shift_labels": targets, "num_items_in_batch": 1, "skip_logits": True}


def _batches(pieces: Iterable[tuple[Tensor, int]], size: int) -> Iterator[list[tuple[Tensor, int]]]:
    """Lists of up to `size` pieces of equal length."""
    group: list[tuple[Tensor, int]] = []
    for piece in pieces:
        if group and (len(group) == size or len(piece[0]) != len(group[0][0])):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
