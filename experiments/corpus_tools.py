"""Tools of the corpus scripts: overlap between texts, held-out groups, prepared tokens with a note of what they hold."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prism.files import commit_folder, fresh_folder
from prism.language.corpus import BPE_TRAINING_BYTES, write_splits
from prism.language.tokenizer import train_bpe

WORDS = re.compile(r"\w+")
SHINGLE = 8
"""Words of a shingle: two texts that share many runs of 8 words share their origin."""
SAMPLED = 32
"""One shingle in this many is kept, the same ones in every text."""


def shingles(text: str) -> set[int]:
    """Hashes of a sample of the runs of `SHINGLE` words of a text."""
    words = WORDS.findall(text.lower())
    runs = (" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))
    return {code for run in runs if (code := zlib.crc32(run.encode())) % SAMPLED == 0}


def groups_of_copies(texts: Sequence[str], overlap: float = 0.1) -> list[list[int]]:
    """Numbers of the texts, those that share at least `overlap` of the smaller one's shingles in one group."""
    kept = [shingles(text) for text in texts]
    holders = defaultdict(list)
    for number, codes in enumerate(kept):
        for code in codes:
            holders[code].append(number)
    shared: Counter[tuple[int, int]] = Counter()
    for numbers in holders.values():
        if len(numbers) < 20:  # a phrase of many texts says nothing about two of them
            shared.update((a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :])
    group = list(range(len(texts)))

    def root(number: int) -> int:
        while group[number] != number:
            number = group[number]
        return number

    for (a, b), count in shared.items():
        if count >= overlap * max(1, min(len(kept[a]), len(kept[b]))):
            group[max(root(a), root(b))] = min(root(a), root(b))
    found = defaultdict(list)
    for number in range(len(texts)):
        found[root(number)].append(number)
    return list(found.values())


def hold_out(sizes: Mapping[str, int], held_bytes: int, largest: int, seed: int) -> tuple[set[str], set[str]]:
    """Names for validation and for test: each at least `held_bytes`, of names not larger than `largest`, by a seed."""
    names = sorted(name for name, size in sizes.items() if size <= largest)
    random.Random(seed).shuffle(names)
    parts: tuple[set[str], set[str]] = set(), set()
    for part in parts:
        while sum(sizes[name] for name in part) < held_bytes:
            if not names:
                raise ValueError(f"too little text to hold out {held_bytes:,} bytes twice: lower --held-bytes")
            part.add(names.pop())
    return parts


def write(folder: Path, splits: Mapping[str, list[str]], bpe_size: int, note: Mapping[str, object]) -> None:
    """Train a BPE on the training part, write the tokens of all splits and note.json; replaces the folder."""
    partial = fresh_folder(folder.with_name(f".{folder.name}.partial"))
    manifest = write_splits(partial, splits, train_bpe(_up_to(BPE_TRAINING_BYTES, splits["train"]), bpe_size))
    (partial / "note.json").write_text(json.dumps(dict(note), indent=1, ensure_ascii=False), encoding="utf-8")
    commit_folder(partial, folder)
    for name, split in manifest.splits.items():
        bytes_per_token = split.text_bytes / split.tokens
        print(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens, {bytes_per_token:.3f} bytes a token")


def _up_to(limit: int, texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text.encode())
