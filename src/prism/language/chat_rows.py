"""Chats as samples: encoded once, packed into rows, cached on disk, and read as batches.

A stored token carries two marks: it is part of an answer, or it starts a chat. A row holds whole chats, one after the other,
and then padding:

    row      | start a b c A B | start d e F G H | padding |
    reset      ^                 ^                             memories are reset: no chat sees another
    targets            A B             F G H                   of the token before each; the others are not predicted

A chat that is longer than a row is cut at its end, or left out; one whose answers are all cut off is left out too. Both are
counted. Packing is best-fit over a few open rows: it depends on the order of the chats and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from filelock import FileLock

from prism.files import check_target, commit_folder, default_cache, fresh_folder, read_json, sha256, write_json
from prism.language.chat import ChatFormat, ChatTokens
from prism.language.chats import Chat, chats, preferences
from prism.language.corpus import Corpus, open_corpus
from prism.language.text import find_files
from prism.language.tokens import MANIFEST, Batch, Manifest, Split, Stream, StreamWriter, writing
from prism.messages import progress_bars
from prism.models.cross_entropy import IGNORED

VERSION = 1
"""Increase it when the same chats would give different rows: old caches are then no longer found."""
ANSWER, START = 1 << 30, 1 << 31
TOKEN = ANSWER - 1
OPEN_ROWS = 64
_FACTS = "chats.json"


@dataclass(frozen=True)
class ChatRecipe:
    """Everything, besides tokenizer and template, that decides which rows come out."""

    sources: tuple[str, ...] = field(default=(), metadata={"short": True})
    """Files in jsonl with a chat or a pair of answers per line (also .gz and .xz), or folders of them (also: --data FILE …)."""
    pattern: str = "*.jsonl*"
    """Glob that selects the files of a folder."""
    context: int = field(default=1024, metadata={"min": 2})
    """Tokens per row. Longer chats are cut or left out, see too_long."""
    too_long: Literal["cut", "drop"] = "cut"
    """Chats longer than a row: cut them at their end, or leave them out. Either way their number is reported."""
    validation: float = 0.05
    """Fraction of the chats held out for validation: every n-th one."""

    def check(self) -> None:
        """Raise ValueError for values out of range. (Not at construction: tyro would put the message in a box.)"""
        if not 0 < self.validation <= 0.5:
            raise ValueError(f"data.validation must be above 0 and at most 0.5, got {self.validation}")


@dataclass
class Facts:
    """What became of the chats, or pairs, of one split."""

    kept: int = 0
    answer_tokens: int = 0
    """Of the answers, before any cut."""
    answer_bytes: int = 0
    """Of their text."""
    longer: int = 0
    """Longer than a row: cut, or left out."""
    left_out: int = 0
    """Left out, because of their length or because no answer fits."""


class Packer:
    """Distributes chats of at most `context` tokens over rows: each goes to the open row that it fills best."""

    def __init__(self, context: int, open_rows: int = OPEN_ROWS) -> None:
        self.context, self.open_rows = context, open_rows
        self._open: list[list[np.ndarray]] = []
        self._free: list[int] = []

    def add(self, chat: np.ndarray) -> list[np.ndarray] | None:
        """Place a chat; returns a row that is full or, when too many are open, the fullest."""
        fitting = [i for i, free in enumerate(self._free) if free >= len(chat)]
        if fitting:
            i = min(fitting, key=lambda i: self._free[i])
        else:
            i = len(self._open)
            self._open.append([])
            self._free.append(self.context)
        self._open[i].append(chat)
        self._free[i] -= len(chat)
        fullest = min(range(len(self._free)), key=lambda i: self._free[i])
        if self._free[fullest] and len(self._open) <= self.open_rows:
            return None
        self._free.pop(fullest)
        return self._open.pop(fullest)

    def rest(self) -> list[list[np.ndarray]]:
        """The rows that are still open."""
        return self._open


@dataclass(frozen=True)
class ChatCorpus:
    """Prepared chats, or pairs: the tokens of both splits, and what became of the chats."""

    corpus: Corpus
    facts: dict[str, Facts]
    filled: float
    """Fraction of the training rows that chats fill; 1 where chats are not packed."""

    @property
    def bytes_per_token(self) -> float:
        """Of the answers that are held out."""
        return self.facts["validation"].answer_bytes / self.facts["validation"].answer_tokens

    def stream(self, split: str) -> Stream:
        return self.corpus.stream(split)

    def summary(self, what: str, context: int) -> str:
        """One line: how many chats are used and how many were too long."""
        train, held = self.facts["train"], self.facts["validation"]
        text = f"{train.kept:,} {what} to train on and {held.kept:,} to validate"
        longer, lost = train.longer + held.longer, train.left_out + held.left_out
        if longer:
            text += f"; {longer:,} have more than {context:,} tokens: {longer - lost:,} are cut, {lost:,} left out"
        return text


def prepare_chats(
    recipe: ChatRecipe,
    chat: ChatFormat,
    packing: bool,
    pairs: bool = False,
    cache: Path | None = None,
    verify: bool = True,
    report: Callable[[str], None] = lambda message: None,
) -> ChatCorpus:
    """The rows of a recipe, from the cache or made now; `prism.language.corpus.prepare` for chats.

    Args:
        packing: put several chats into one row. Otherwise each is stored alone, without padding.
        pairs: the lines are pairs of answers; each is stored as two chats, the preferred one first.
        report: called with a message when the files have to be read.
    """
    recipe.check()
    files = find_files(recipe.sources, recipe.pattern)
    place = check_target((cache or default_cache()) / "chats", folder=True, name="data.cache")
    place.mkdir(parents=True, exist_ok=True)
    folder = place / _key(recipe, files, chat, packing, pairs)
    with FileLock(f"{folder}.lock"):
        if not (folder / MANIFEST).exists():
            report(f"encoding {', '.join(recipe.sources)} (done once, then cached)")
            partial = fresh_folder(place / f".{folder.name}.partial")
            _write(recipe, files, chat, packing, pairs, partial)
            commit_folder(partial, folder)
    about = read_json(folder / _FACTS)
    facts = {name: Facts(**found) for name, found in about["facts"].items()}
    return ChatCorpus(open_corpus(folder, verify), facts, about["filled"])


class ChatRows:
    """Prepared chats as numbered samples: rows of `context` tokens or, without packing, one chat each."""

    def __init__(self, stream: Stream, context: int, packing: bool) -> None:
        self.stream, self.context, self.packing = stream, context, packing
        self._starts = np.arange(0, len(stream) + 1, context) if packing else chat_starts(stream)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, numbers: np.ndarray) -> list[np.ndarray]:
        """The stored tokens of rows, with their marks, int64."""
        return [self.stream.read(int(self._starts[i]), int(self._starts[i + 1])) for i in np.asarray(numbers).tolist()]

    def predicted(self, numbers: np.ndarray) -> int:
        """Number of targets in these rows."""
        return sum(int(((row[1:] & (ANSWER | START)) == ANSWER).sum()) for row in self.read(numbers))

    def batch(self, numbers: np.ndarray) -> Batch:
        """The rows with these numbers, in this order."""
        rows = self.read(numbers)
        stored = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for target, row in zip(stored, rows, strict=True):
            target[: len(row)] = row
        return batch_of(torch.from_numpy(stored), separate=self.packing)


def batch_of(stored: torch.Tensor, separate: bool) -> Batch:
    """Inputs, targets and resets of stored tokens `[B, T]`.

    Args:
        separate: whether a row may hold several chats. A chat alone starts without a state anyway.
    """
    tokens, starts = stored & TOKEN, (stored & START) != 0
    answers = ((stored & ANSWER) != 0) & ~starts  # a first token is predicted from nothing
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = torch.where(answers[:, 1:], tokens[:, 1:], IGNORED)
    return Batch(tokens, targets, starts if separate else None, some=True)


def chat_starts(stream: Stream, piece: int = 1 << 24) -> np.ndarray:
    """Where the chats of a stream start, and its length: int64 `[chats + 1]`."""
    found = [
        np.flatnonzero(stream.read(start, min(start + piece, len(stream))) & START) + start
        for start in range(0, len(stream), piece)
    ]
    return np.concatenate([*found, [len(stream)]])


def _key(recipe: ChatRecipe, files: list[Path], chat: ChatFormat, packing: bool, pairs: bool) -> str:
    """The cache key. A file counts as unchanged while path, size and modification time are."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    texts = [hashlib.sha256(text.encode()).hexdigest() for text in (chat.tokenizer.definition, chat.template)]
    parts = [VERSION, stats, texts, sorted(chat.special.items()), packing, pairs]
    parts += [recipe.context, recipe.too_long, recipe.validation]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _write(recipe: ChatRecipe, files: list[Path], chat: ChatFormat, packing: bool, pairs: bool, folder: Path) -> None:
    """Write rows, facts and manifest into an empty folder."""
    (folder / "tokenizer.json").write_text(chat.tokenizer.definition, encoding="utf-8")
    splits = {name: _SplitWriter(folder, name, recipe, chat, packing) for name in ("train", "validation")}
    period, number = round(1 / recipe.validation), 0
    with writing(*(split.writer for split in splits.values())):
        for number, found in enumerate(_encoded(files, chat, pairs), 1):
            splits["train" if number % period else "validation"].add(found)
        for split in splits.values():
            split.finish()
    what, facts = "pairs" if pairs else "chats", {name: split.facts for name, split in splits.items()}
    for name, use in (("train", "to train on"), ("validation", "to validate with")):
        if not facts[name].kept:
            raise ValueError(
                f"{', '.join(recipe.sources)} leaves no {what} {use} ({number:,} read, 1 in {period} held out, "
                f"{sum(each.left_out for each in facts.values()):,} too long): give more {what}, a larger "
                "data.validation (a fraction, at most 0.5) or a longer data.context"
            )
    train = splits["train"]
    filled = train.places / train.writer.tokens
    write_json(folder / _FACTS, {"facts": {name: asdict(each) for name, each in facts.items()}, "filled": filled})
    Manifest(
        dtype=train.writer.dtype.str,
        vocab_size=chat.tokenizer.size,
        end=chat.tokenizer.end,
        end_token=chat.tokenizer.end_token,
        tokenizer_sha256=sha256(folder / "tokenizer.json"),
        streams={name: split.writer.shards for name, split in splits.items()},
        splits={
            name: Split(name, 0, split.writer.tokens, split.facts.kept, split.facts.answer_bytes)
            for name, split in splits.items()
        },
    ).save(folder)


class _SplitWriter:
    """Writes the chats of one split: packed into rows, or one by one."""

    def __init__(self, folder: Path, name: str, recipe: ChatRecipe, chat: ChatFormat, packing: bool) -> None:
        self.recipe, self.end, self.facts = recipe, chat.tokenizer.end, Facts()
        self.writer = StreamWriter(folder, name, np.dtype("<u4"))
        self.packer = Packer(recipe.context) if packing else None
        self.places = 0
        """Tokens of chats, without padding."""

    def add(self, found: tuple[ChatTokens, ...]) -> None:
        """Write the chat, or the two chats, of a line, unless they are left out; count them."""
        context, facts = self.recipe.context, self.facts
        longer = any(len(chat.tokens) > context for chat in found)
        facts.longer += longer
        lost = not all(chat.answers[1:context].any() for chat in found)
        if longer and (lost or self.recipe.too_long == "drop"):
            facts.left_out += 1
            return
        facts.kept += 1
        for chat in found:
            facts.answer_tokens += int(chat.answers.sum())
            facts.answer_bytes += chat.answer_bytes
            stored = (chat.tokens | np.where(chat.answers, ANSWER, 0))[:context]
            stored[0] |= START
            self.places += len(stored)
            if self.packer is None:
                self.writer.append(stored)
            elif (row := self.packer.add(stored)) is not None:
                self._write_row(row)

    def finish(self) -> None:
        for row in self.packer.rest() if self.packer is not None else ():
            self._write_row(row)

    def _write_row(self, row: list[np.ndarray]) -> None:
        padding = np.full(self.recipe.context - sum(map(len, row)), self.end, dtype=np.int64)
        self.writer.append(np.concatenate([*row, padding]))


def _encoded(files: list[Path], chat: ChatFormat, pairs: bool) -> Iterator[tuple[ChatTokens, ...]]:
    """The chats of every line, one or two, as tokens. A line that the template refuses is named."""
    from rich.progress import TextColumn

    with progress_bars(TextColumn("{task.completed:,}")) as bars:
        bar = bars.add_task("encoding pairs" if pairs else "encoding chats", total=None)
        for where, found in preferences(files) if pairs else chats(files):
            both = (found,) if isinstance(found, Chat) else (found.chosen, found.rejected)
            try:
                encoded = tuple(chat.labelled(each.messages, each.answered) for each in both)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if not all(each.answers[1:].any() for each in encoded):
                raise ValueError(f"{where}: {chat.name} writes no answer that could be learned")
            bars.advance(bar)
            yield encoded
