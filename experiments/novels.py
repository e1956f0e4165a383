"""Prepare novels: files of books become train, validation and test tokens, held out by title.

    python experiments/novels.py OUT books-clic.txt.xz books-eltec.txt.xz

A file holds books separated by <|endoftext|>. Editions of one work (texts that share a tenth of their runs of eight words)
count as one title: the first is kept. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from experiments.corpus_tools import groups_of_copies, hold_out, write
from prism.files import open_bytes

END = "<|endoftext|>"


def books(path: Path) -> list[str]:
    """The books of a file, with plain spaces and at most one empty line in a row."""
    with open_bytes(path) as file:
        text = file.read().decode()
    text = text.replace("\ufeff", "").replace("\u00a0", " ")
    return [re.sub(r"\n\s*\n", "\n\n", book.strip()) for book in text.split(END) if book.strip()]


def title(book: str) -> str:
    return " ".join(book[:200].split())[:70]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the prepared tokens; replaced")
    parser.add_argument("files", type=Path, nargs="+", help="books separated by <|endoftext|>, plain, .gz or .xz")
    parser.add_argument("--held-bytes", type=int, default=3_500_000, help="text held out for validation, and for test")
    parser.add_argument("--largest", type=int, default=900_000, help="largest book that is held out, in bytes")
    parser.add_argument("--bpe-size", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of titles")
    given = parser.parse_args()
    texts = [book for path in given.files for book in books(path)]
    groups = groups_of_copies(texts)
    works = {title(texts[group[0]]): texts[group[0]] for group in groups}
    sizes = {name: len(text.encode()) for name, text in works.items()}
    validation, test = hold_out(sizes, given.held_bytes, given.largest, given.seed)
    names = {
        "train": [name for name in works if name not in validation | test],
        "validation": sorted(validation),
        "test": sorted(test),
    }
    copies = [[title(texts[number]) for number in group] for group in groups if len(group) > 1]
    note = {"splits": names, "editions_of_one_work": copies}
    write(given.out, {split: [works[name] for name in chosen] for split, chosen in names.items()}, given.bpe_size, note)


if __name__ == "__main__":
    main()
