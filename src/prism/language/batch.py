"""Continue many prompts in batches: one row per prompt, each as if it were alone.

Every prompt is read alone and has its own random generator, so its text is the one that `Session` writes with the same seed
(a product over several rows may round differently from one over a single row, which seldom changes a token). When a row has
ended, the next prompt takes its place.

Results go to a journal, line by line, and the finished journal gets its name. An interrupted journal is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism.files import inner_suffix, open_bytes, reason, sync, write_atomically
from prism.language.generate import LanguageModel, Sampling, Session
from prism.language.text import documents
from prism.models.cache import PrismCache
from prism.models.decode import Decoder, sizes_for

JSONL = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Prompt:
    """A prompt and its place in the file, from 0."""

    index: int
    text: str


@dataclass(frozen=True)
class Continuation:
    """What the model has written after a prompt."""

    prompt: Prompt
    text: str
    tokens: int
    ended: bool
    """Whether the model wrote its end token."""

    def row(self) -> dict[str, Any]:
        """As a line of the output."""
        about = {"index": self.prompt.index, "prompt": self.prompt.text, "text": self.text}
        return {**about, "tokens": self.tokens, "ended": self.ended}


def read_prompts(path: Path, field: str = "prompt") -> list[Prompt]:
    """The prompts of a file: one per line, or with the suffix .jsonl one per row under `field`. Empty lines are skipped."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if inner_suffix(path) in JSONL:
        texts = ["".join(document) for document in documents(path, field)]
    else:
        with open_bytes(path) as file:
            try:
                lines = file.read().decode().split("\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        texts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{path} holds no prompts: give one per line, or one per row of a .jsonl file")
    return [Prompt(index, text) for index, text in enumerate(texts)]


def prompts_sha256(prompts: list[Prompt]) -> str:
    """A hash of the prompts' texts, by which an interrupted output knows them."""
    return hashlib.sha256(json.dumps([prompt.text for prompt in prompts]).encode()).hexdigest()


class Row:
    """A prompt that is being continued."""

    def __init__(self, lm: LanguageModel, prompt: Prompt, seed: int, state_dtype: torch.dtype) -> None:
        self.prompt = prompt
        self.session = Session(lm, seed, state_dtype)
        self.session.read(prompt.text)
        self.session.read_start()
        self.pieces: list[str] = []
        self.tokens = 0

    def take_cache(self) -> PrismCache:
        """The states after the prompt; the row does not keep them."""
        cache: PrismCache = self.session.reader.cache
        self.session.reader.cache = PrismCache()
        return cache

    def choose(self, limit: int, sampling: Sampling) -> int | None:
        """The next token; None if the row is complete."""
        return None if self.tokens >= limit else self.session.choose(sampling)

    def push(self, token: int, logits: Tensor) -> None:
        self.session.logits = logits
        self.pieces.append(self.session.text.push(token))
        self.tokens += 1

    def finished(self) -> Continuation:
        text = "".join([*self.pieces, self.session.text.flush()])
        return Continuation(self.prompt, text, self.tokens, self.session.ended)


def continue_all(
    lm: LanguageModel,
    prompts: Iterable[Prompt],
    limit: int,
    sampling: Sampling,
    seed: int = 0,
    batch: int = 8,
    state_dtype: torch.dtype = torch.float32,
    stepped: Callable[[int], bool] = lambda rows: False,
) -> Iterator[Continuation]:
    """Continue each prompt by up to `limit` tokens; yields them as they are completed.

    Args:
        batch: rows at a time. A model of transformers continues one at a time.
        stepped: called with the number of rows after each step; True stops, and unfinished rows are dropped.
    """
    waiting, rows = iter(prompts), list[Row]()
    decoder = Decoder(lm.model, sizes_for(lm.model, batch), state_dtype) if lm.own else None
    while True:
        while len(rows) < (batch if lm.own else 1) and (prompt := next(waiting, None)) is not None:
            rows.append(Row(lm, prompt, seed, state_dtype))
        chosen = {row.prompt.index: row.choose(limit, sampling) for row in rows}
        done = [row for row in rows if chosen[row.prompt.index] is None]
        rows = [row for row in rows if chosen[row.prompt.index] is not None]
        if decoder is not None:
            decoder.leave(done)
        for row in done:
            yield row.finished()
        if not rows and not done:
            return
        if not rows:
            continue
        tokens = {row: token for row in rows if (token := chosen[row.prompt.index]) is not None}
        if decoder is None:
            following = {row: row.session.reader.read_next(token) for row, token in tokens.items()}
        else:
            known = decoder.texts
            for row in rows:
                if row not in known:
                    decoder.join(row, row.take_cache())
            held: list[Row] = decoder.texts
            following = dict(zip(held, decoder.step([tokens[row] for row in held]), strict=True))
        for row, token in tokens.items():
            row.push(token, following[row])
        if stepped(len(rows)):
            return


class Journal:
    """An output file that is written line by line under another name, and renamed when it is complete.

    Args:
        path: the output file. The journal is `path` with `.partial` appended.
        settings: what the results depend on: a journal of other settings is not resumed.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.settings = json.loads(json.dumps(settings))
        self.rows: dict[int, dict[str, Any]] = {}
        if self.partial.exists():
            self._resume()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.partial.open("ab")
        if self._file.tell() == 0:
            self._write({"settings": self.settings})

    def _resume(self) -> None:
        """Read the finished rows. A last line that was cut off is removed."""
        data = self.partial.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            first, *rows = [json.loads(line) for line in whole.splitlines()] or [{"settings": self.settings}]
            stored, self.rows = first["settings"], {row["index"]: row for row in rows}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.partial} is not an interrupted output of this command: remove it") from error
        if stored != self.settings:
            changed = [name for name in self.settings if stored.get(name) != self.settings[name]]
            raise ValueError(
                f"{self.partial} was written with other settings ({', '.join(changed)}): give the same ones to resume it, or "
                "remove it"
            )
        if whole != data:
            write_atomically(self.partial, whole)

    def add(self, row: dict[str, Any]) -> None:
        self._write(row)
        self.rows[row["index"]] = row

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(f"{self.partial} cannot be written: {reason(error)}") from error

    def close(self) -> None:
        self._file.close()

    def finish(self) -> None:
        """Write the output in the order of the prompts, and remove the journal."""
        self.close()
        lines = [json.dumps(self.rows[index], ensure_ascii=False) + "\n" for index in sorted(self.rows)]
        write_atomically(self.path, "".join(lines))
        self.partial.unlink()
        sync(self.path.parent)
