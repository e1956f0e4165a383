"""Prepare a corpus: turn text into tokens on disk, once, and find them again in a cache folder.

The folder's name is a hash of everything the tokens depend on. One process prepares while the others wait for its lock
(which is released when the process dies). A killed process leaves only a folder with a temporary name; the next one
removes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock

from prism.files import check_target, commit_folder, default_cache, fresh_folder, sha256
from prism.language import text
from prism.language.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from prism.language.tokens import MANIFEST, Manifest, Split, Stream, StreamWriter, check_tokens, smallest_dtype, writing

VERSION = 1
"""Increase it when the same text would give different tokens: old caches are then no longer found."""

BPE_TRAINING_BYTES = 1 << 28
"""A BPE is trained on about this much text from the start of the corpus."""
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which tokens come out."""

    sources: tuple[str, ...] = ()
    """Text, jsonl or parquet files (also .gz and .xz), folders of them, or hub:owner/dataset[:configuration]. Default: the
    source code of the Python standard library on this machine."""
    pattern: str | None = None
    """Glob that selects the files of a folder, such as *.py. None: text, markdown, jsonl and parquet files."""
    field: str = "text"
    """Column of jsonl and parquet files that holds the text."""
    tokenizer: str = "bytes"
    """bytes, bpe (trained on the data), or the path of a tokenizer.json."""
    bpe_size: int = 8192
    """Vocabulary size of a trained BPE."""
    end_token: str | None = None
    """End-of-document token of a tokenizer.json. None: the first common name it has, such as <|endoftext|>."""
    validation: float = 0.01
    """Fraction of the data held out for validation."""
    split: Literal["auto", "document", "tail"] = "auto"
    """Hold out every n-th document, or the tail of the data. auto: documents if there are enough of them."""
    max_bytes: int | None = None
    """Read at most about this many bytes of text, rounded up to a whole document. None: all."""

    def check(self) -> None:
        """Raise ValueError for values out of range. (Not at construction: tyro would put the message in a box.)"""
        if not 0 < self.validation <= 0.5:
            raise ValueError(f"data.validation must be above 0 and at most 0.5, got {self.validation}")
        if self.split not in ("auto", "document", "tail"):
            raise ValueError(f"data.split must be auto, document or tail, got {self.split!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"data.max_bytes must be at least 1, got {self.max_bytes}")


@dataclass(frozen=True)
class Corpus:
    """Prepared tokens: their folder, their manifest, and the splits `train` and `validation`."""

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
    """The tokens of a recipe, from the cache or made now.

    Args:
        cache: the folder that holds prepared tokens; None: `default_cache()`.
        verify: check every shard against its SHA-256.
        report: called with a message when tokens have to be made, which can take long.
    """
    recipe.check()
    cache = check_target((cache or default_cache()) / "tokens", folder=True, name="data.cache")
    cache.mkdir(parents=True, exist_ok=True)
    source = _Source(recipe)
    folder = cache / source.key()
    with FileLock(f"{folder}.lock"):
        if not (folder / MANIFEST).exists():
            report(f"tokenizing {source.name} (done once, then cached)")
            partial = fresh_folder(cache / f".{folder.name}.partial")
            _write(source, partial)
            commit_folder(partial, folder)
    return open_corpus(folder, verify)


class _Source:
    """The documents of a recipe; they can be iterated any number of times."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        hubs = [name for name in recipe.sources if name.startswith(text.HUB)]
        if hubs and len(hubs) < len(recipe.sources):
            raise ValueError("data.sources mixes files with hub datasets: give only one kind")
        self.hubs = hubs
        self.files: list[Path] = []
        if not hubs:
            named = text.find_files(recipe.sources, recipe.pattern, "--data.pattern")
            self.files = named if recipe.sources else text.standard_library()

    @property
    def name(self) -> str:
        return ", ".join(self.recipe.sources) or "the Python standard library"

    def key(self) -> str:
        """The cache key. A file counts as unchanged while path, size and modification time are; the manifest hashes tokens."""
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
        """(piece, whether it starts a document), without empty documents; ends at the first document end after `max_bytes`."""
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
        """Hold out every n-th document: n; None: hold out a tail instead."""
        period = round(1 / self.recipe.validation)
        if self.recipe.split == "auto":
            return period if len(list(islice(self._starts(), 2 * period))) == 2 * period else None
        return period if self.recipe.split == "document" else None

    def _starts(self) -> Iterator[bool]:
        """One True per non-empty document, reading no more of each document than necessary."""
        if self.recipe.max_bytes is not None:  # the limit counts bytes, so every piece has to be read
            return (True for _, starts in self.pieces() if starts)
        return (True for document in self.documents() if any(document))


def _write(source: _Source, folder: Path) -> None:
    """Write tokenizer, shards and manifest of a source into an empty folder."""
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


def write_splits(folder: Path, splits: Mapping[str, Iterable[str]], tokenizer: Tokenizer) -> Manifest:
    """Write tokens of documents whose split is given, as `prepare` stores them; splits besides train and validation are kept.

    Args:
        folder: an empty folder.
        splits: the documents of each split, each one text.
    """
    (folder / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")
    dtype = smallest_dtype(tokenizer.size)
    writers = {name: StreamWriter(folder, name, dtype) for name in splits}
    found = {}
    with writing(*writers.values()):
        for name, documents in splits.items():
            count = Split(name, 0, 0, 0, 0)
            for batch in _batches((document, True) for document in documents if document):
                for (document, _), tokens in zip(batch, tokenizer.encode([text for text, _ in batch]), strict=True):
                    writers[name].append(tokens)
                    writers[name].append(np.array([tokenizer.end]))
                    size = len(document.encode())
                    count = replace(count, documents=count.documents + 1, text_bytes=count.text_bytes + size)
            if not count.documents:
                raise ValueError(f"the split {name} has no text: give it at least one document")
            found[name] = replace(count, stop=writers[name].tokens)
    manifest = Manifest(
        dtype=dtype.str,
        vocab_size=tokenizer.size,
        end=tokenizer.end,
        end_token=tokenizer.end_token,
        tokenizer_sha256=sha256(folder / "tokenizer.json"),
        streams={name: writer.shards for name, writer in writers.items()},
        splits=found,
    )
    manifest.save(folder)
    return manifest


def open_corpus(folder: Path, verify: bool = True) -> Corpus:
    """Prepared tokens in a folder, for example one that `write_splits` wrote and that travelled to another machine."""
    if not (folder / MANIFEST).is_file():
        inside = sorted(path.parent for path in folder.glob(f"tokens/*/{MANIFEST}"))  # given a cache as a whole
        such = f", such as {inside[0]}" if inside else ""
        raise FileNotFoundError(f"{folder} has no {MANIFEST}: give a folder of prepared tokens{such}")
    manifest = Manifest.load(folder)
    check_tokens(folder, manifest, contents=verify)
    return Corpus(folder, manifest)


def _cut_tail(whole: Split, fraction: float) -> dict[str, Split]:
    """Hold out the last tokens. Their bytes are counted in proportion, because the cut may fall inside a character."""
    cut = whole.tokens - max(2, round(whole.tokens * fraction))
    if cut < 2:
        raise ValueError(f"the corpus has {whole.tokens} tokens, too few to train and to validate on")
    held_bytes = round(whole.text_bytes * (whole.tokens - cut) / whole.tokens)
    return {
        "train": replace(whole, stop=cut, text_bytes=whole.text_bytes - held_bytes),
        "validation": replace(whole, start=cut, documents=0, text_bytes=held_bytes),
    }


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces in lists of about `_BATCH_CHARACTERS`, which the tokenizer encodes in parallel."""
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
    """The first pieces, of about `limit` bytes in total."""
    for piece in pieces:
        if limit <= 0:
            return
        yield piece
        limit -= len(piece.encode())
