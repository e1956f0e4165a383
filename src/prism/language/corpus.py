"""From text to tokens on disk, once: whoever comes second finds them ready.

The tokens live in a cache folder under a key made of everything they depend on. One process prepares (a lock that dies with
its holder), the others wait; a killed preparation leaves only a folder with a temporary name, which the next one clears.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock

from prism.files import check_target, commit_folder, default_cache, fresh_folder, sha256
from prism.language import text
from prism.language.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from prism.language.tokens import MANIFEST, Manifest, Split, Stream, StreamWriter, check_tokens, smallest_dtype, writing

VERSION = 1
"""Raise it when the same text would give other tokens: old caches are then no longer found."""

BPE_TRAINING_BYTES = 1 << 28
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which tokens come out. The command line's `data` section documents each."""

    sources: tuple[str, ...] = ()
    pattern: str | None = None
    field: str = "text"
    tokenizer: str = "bytes"
    bpe_size: int = 8192
    end_token: str | None = None
    validation: float = 0.01
    split: str = "auto"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation <= 0.5:
            raise ValueError(f"data.validation must be above 0 and at most 0.5, got {self.validation}")
        if self.split not in ("auto", "document", "tail"):
            raise ValueError(f"data.split must be auto, document or tail, got {self.split!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"data.max_bytes must be at least 1, got {self.max_bytes}")


@dataclass(frozen=True)
class Corpus:
    """Prepared tokens: where they are, what they are, and the two splits to read from."""

    folder: Path
    manifest: Manifest

    def stream(self, split: str) -> Stream:
        return Stream(self.folder, self.manifest, split)

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


def prepare(
    recipe: Recipe,
    cache: Path | None = None,
    verify: bool = True,
    report: Callable[[str], None] = lambda message: None,
) -> Corpus:
    """The tokens of a recipe, made now if no one has made them before.

    Args:
        cache: the folder that keeps tokens.
        verify: compare every shard with its hash.
        report: is told when tokens are made, which can take long.
    """
    cache = check_target((cache or default_cache()) / "tokens", folder=True, name="data.cache")
    cache.mkdir(parents=True, exist_ok=True)
    source = _Source(recipe)
    folder = cache / source.key()
    with FileLock(f"{folder}.lock"):
        if not (folder / MANIFEST).exists():
            report(f"making tokens of {source.name}, once")
            partial = fresh_folder(cache / f".{folder.name}.partial")
            _write(source, partial)
            commit_folder(partial, folder)
    manifest = Manifest.load(folder)
    check_tokens(folder, manifest, contents=verify)
    return Corpus(folder, manifest)


class _Source:
    """The documents of a recipe, as often as they are asked for."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        hubs = [name for name in recipe.sources if name.startswith(text.HUB)]
        if hubs and len(hubs) < len(recipe.sources):
            raise ValueError("data.sources mixes files with hub datasets: give one kind")
        self.hubs = hubs
        self.files: list[Path] = []
        if not hubs:
            named = text.find_files(recipe.sources, recipe.pattern)
            self.files = named if recipe.sources else text.standard_library()

    @property
    def name(self) -> str:
        return ", ".join(self.recipe.sources) or "the Python standard library"

    def key(self) -> str:
        """A file counts as the same while its place, size and time stay; its content is hashed with the tokens."""
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        recipe = {**vars(self.recipe), "sources": self.hubs or stats}
        if self.recipe.tokenizer not in ("bytes", "bpe"):
            definition = load_tokenizer(Path(self.recipe.tokenizer).expanduser(), self.recipe.end_token).definition
            recipe["tokenizer"] = hashlib.sha256(definition.encode()).hexdigest()
        return hashlib.sha256(json.dumps([VERSION, recipe]).encode()).hexdigest()[:20]

    def documents(self) -> Iterator[text.Document]:
        for name in self.hubs:
            yield from text.hub_documents(name, self.recipe.field)
        for path in self.files:
            yield from text.documents(path, self.recipe.field)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """(piece, does it start a document), empty documents left out, up to `max_bytes` (then cut at a document)."""
        seen, limit = 0, self.recipe.max_bytes or float("inf")
        for document in self.documents():
            if seen >= limit:
                return
            starts = True
            for piece in document:
                if piece:
                    seen += len(piece.encode())
                    yield piece, starts
                    starts = False

    def tokenizer(self) -> Tokenizer:
        if self.recipe.tokenizer == "bytes":
            return ByteTokenizer()
        if self.recipe.tokenizer == "bpe":
            return train_bpe(_up_to(BPE_TRAINING_BYTES, (piece for piece, _ in self.pieces())), self.recipe.bpe_size)
        return load_tokenizer(Path(self.recipe.tokenizer).expanduser(), self.recipe.end_token)

    def held_out_period(self) -> int | None:
        """Every how many documents one is held out; None: a tail is held out instead."""
        period = round(1 / self.recipe.validation)
        if self.recipe.split == "auto":
            return period if len(list(islice(self._starts(), 2 * period))) == 2 * period else None
        return period if self.recipe.split == "document" else None

    def _starts(self) -> Iterator[bool]:
        """One for every document that is not empty, reading no more of it than that takes."""
        if self.recipe.max_bytes is not None:  # where that ends only a reading of everything tells
            return (True for _, starts in self.pieces() if starts)
        return (True for document in self.documents() if any(document))


def _write(source: _Source, folder: Path) -> None:
    if next(source.pieces(), None) is None:
        raise ValueError(f"there is no text in {source.name}: the corpus is empty")
    tokenizer, period = source.tokenizer(), source.held_out_period()
    (folder / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")
    dtype = smallest_dtype(tokenizer.size)
    writers = {name: StreamWriter(folder, name, dtype) for name in ("train", "validation")}
    counts = {name: Split(name, 0, 0, 0, 0) for name in writers}
    name, document = "train", -1
    with writing(*writers.values()):
        for batch in _batches(source.pieces()):
            for (piece, starts), tokens in zip(batch, tokenizer.encode([piece for piece, _ in batch]), strict=True):
                if starts:
                    if document >= 0:
                        writers[name].append(np.array([tokenizer.end]))
                    document += 1
                    held_out = period is not None and document % period == period - 1
                    name = "validation" if held_out else "train"
                count = counts[name]
                counts[name] = replace(
                    count, documents=count.documents + starts, text_bytes=count.text_bytes + len(piece.encode())
                )
                writers[name].append(tokens)
        writers[name].append(np.array([tokenizer.end]))
    splits = {key: replace(count, stop=writers[key].tokens) for key, count in counts.items()}
    if period is None:
        splits = _cut_tail(splits["train"], source.recipe.validation)
    elif not splits["validation"].tokens:
        raise ValueError(
            f"{source.name} has {document + 1} documents, too few to hold out 1 in {period}: "
            "use data.split tail or a larger data.validation"
        )
    Manifest(
        dtype=dtype.str,
        vocab_size=tokenizer.size,
        end=tokenizer.end,
        end_token=tokenizer.end_token,
        tokenizer_sha256=sha256(folder / "tokenizer.json"),
        streams={key: writer.shards for key, writer in writers.items() if writer.tokens},
        splits=splits,
    ).save(folder)


def _cut_tail(whole: Split, fraction: float) -> dict[str, Split]:
    """Hold out the last tokens; their bytes are their share of the whole, for a cut may fall inside a character."""
    cut = whole.tokens - max(2, round(whole.tokens * fraction))
    if cut < 2:
        raise ValueError(f"the corpus has {whole.tokens} tokens, too few to train and to validate on")
    held_bytes = round(whole.text_bytes * (whole.tokens - cut) / whole.tokens)
    return {
        "train": replace(whole, stop=cut, text_bytes=whole.text_bytes - held_bytes),
        "validation": replace(whole, start=cut, documents=0, text_bytes=held_bytes),
    }


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _up_to(limit: int, pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        if limit <= 0:
            return
        yield piece
        limit -= len(piece.encode())
