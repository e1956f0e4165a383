"""Prepare source code: Python files of installed packages become train, validation and test tokens, held out by package.

    python experiments/code_corpus.py OUT .venv/lib/python3.11/site-packages --standard-library

A folder with *.dist-info folders (site-packages, or what `pip install --target` made) holds distributions: each is one
package. Any other folder is one package. A document is a folder of a package: its files, in order, each after a line with
its name. Files are de-duplicated: a file most of whose lines were seen before is dropped, held-out packages first, so that
copies of them in other packages leave the training part. Nothing is downloaded; note.json names packages and versions.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from experiments.corpus_tools import hold_out, write
from prism.language.text import standard_library

SMALLEST, LARGEST = 200, 200_000
"""Bytes of a file that is kept: larger ones are mostly tables."""
LONGEST_LINE = 400
SEEN = 0.5
"""A file is dropped if more than this part of its lines was seen before."""
Files = dict[str, dict[str, str]]
"""Package → file → source."""


def sources(folder: Path) -> Files:
    """The Python files of a folder, by package."""
    found: Files = defaultdict(dict)
    if any(folder.glob("*.dist-info")):
        for distribution in distributions(path=[str(folder)]):
            name = f"{distribution.metadata['Name']} {distribution.version}"
            for file in distribution.files or ():
                if file.suffix == ".py" and ".." not in file.parts:
                    add(found[name], str(file), folder / file)
    else:
        for path in sorted(folder.rglob("*.py")):
            add(found[folder.name], str(path.relative_to(folder.parent)), path)
    return found


def add(files: dict[str, str], name: str, path: Path) -> None:
    """Keep a file if it looks written by a person."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if SMALLEST <= len(text) <= LARGEST and not looks_generated(text):
        files[name] = text


def looks_generated(text: str) -> bool:
    """Very long lines, or mostly digits and punctuation: tables of data."""
    letters = sum(map(str.isalpha, text))
    spaces = sum(map(str.isspace, text))
    return max(map(len, text.splitlines())) > LONGEST_LINE or letters < 0.55 * (len(text) - spaces)


def without_copies(files: dict[str, str], seen: set[int]) -> dict[str, str]:
    """The files with enough new lines; adds their lines to those seen. Short lines (`else:`) say nothing."""
    kept = {}
    for name, text in sorted(files.items()):
        lines = {hash(line) for raw in text.splitlines() if len(line := re.sub(r"\s+", " ", raw.strip())) > 15}
        if lines and len(lines & seen) <= SEEN * len(lines):
            kept[name] = text
            seen |= lines
    return kept


def documents(files: dict[str, str]) -> Iterator[str]:
    """One text for each folder of a package."""
    folders: dict[str, list[str]] = defaultdict(list)
    for name, text in sorted(files.items()):
        folders[str(Path(name).parent)].append(f"# file: {name}\n{text.rstrip()}\n")
    return ("\n".join(parts) for parts in folders.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the prepared tokens; replaced")
    parser.add_argument("folders", type=Path, nargs="+", help="site-packages folders, or folders of one package each")
    parser.add_argument("--standard-library", action="store_true", help="also this Python's standard library")
    parser.add_argument("--held-bytes", type=int, default=2_500_000, help="text held out for validation, and for test")
    parser.add_argument("--largest", type=int, default=1_300_000, help="largest package that is held out, in bytes")
    parser.add_argument("--train-bytes", type=int, help="keep at most this much training text; default: all")
    parser.add_argument("--exclude", nargs="*", default=("prism",), help="names of distributions to leave out")
    parser.add_argument("--bpe-size", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of packages and the order of documents")
    given = parser.parse_args()
    packages: Files = {}
    for folder in given.folders:
        packages |= sources(folder)
    if given.standard_library:
        library: dict[str, str] = {}
        for path in standard_library():
            add(library, "/".join(path.parts[-2:]), path)
        packages["python standard library"] = library
    packages = {name: files for name, files in packages.items() if files and name.split()[0] not in given.exclude}
    alone = {name: without_copies(files, set()) for name, files in packages.items()}
    sizes = {name: sum(map(len, files.values())) for name, files in alone.items()}
    validation, test = hold_out(sizes, given.held_bytes, given.largest, given.seed)
    others = [name for name in sorted(packages, key=str.lower) if name not in validation | test]
    seen: set[int] = set()
    names = {
        "test": sorted(test),
        "validation": sorted(validation),
        "train": others,
    }  # the order decides who keeps a copy
    splits = {
        split: [text for name in chosen for text in documents(without_copies(packages[name], seen))]
        for split, chosen in names.items()
    }
    random.Random(given.seed).shuffle(splits["train"])
    if given.train_bytes is not None:
        splits["train"] = up_to(splits["train"], given.train_bytes)
    order = ("train", "validation", "test")
    write(given.out, {name: splits[name] for name in order}, given.bpe_size, {"splits": names, "bytes": sizes})


def up_to(texts: list[str], limit: int) -> list[str]:
    """The first texts, of about `limit` bytes."""
    kept, size = [], 0
    for text in texts:
        if size >= limit:
            break
        kept.append(text)
        size += len(text.encode())
    return kept


if __name__ == "__main__":
    main()
