"""Corpora: editions of one work are found, copies are dropped, what is held out stays out of training."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from experiments import code_corpus, novels
from experiments.corpus_tools import groups_of_copies, hold_out
from prism.language.corpus import open_corpus
from prism.language.tokenizer import load_tokenizer


def story(seed: int, words: int = 1500) -> str:
    chosen = random.Random(seed)
    return " ".join("".join(chosen.choices("abcdefghij", k=4)) for _ in range(words))


def test_editions_are_one_work() -> None:
    """With another preface, other capitals and a cut; a text that quotes a little of another is a work of its own."""
    first, second = story(0), story(1)
    edition = f"A PREFACE. {first[:5000].upper()}\n\n{first[5000:]}"
    quoting = story(2) + first[:200]
    assert groups_of_copies([first, second, edition, quoting]) == [[0, 2], [1], [3]]


def test_held_out_parts_are_disjoint_and_large_enough() -> None:
    sizes = {f"book {n}": 10 * n for n in range(1, 30)}
    validation, test = hold_out(sizes, 300, largest=200, seed=0)
    assert not validation & test
    assert all(sum(sizes[name] for name in part) >= 300 for part in (validation, test))
    assert max(sizes[name] for name in validation | test) <= 200
    with pytest.raises(ValueError, match="too little text"):
        hold_out(sizes, 3000, largest=200, seed=0)


def text_of(folder: Path, split: str) -> str:
    corpus = open_corpus(folder)
    stream = corpus.stream(split)
    return load_tokenizer(corpus.tokenizer_file).decode(stream.read(0, len(stream)))


def test_novels_are_held_out_by_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = [f"Title {n}\n\n{story(n, 300)}" for n in range(8)]
    (tmp_path / "a.txt").write_text(novels.END.join(books))
    (tmp_path / "b.txt").write_text(novels.END.join(f"ANOTHER EDITION\n\n{book}" for book in books[:4]))
    out = tmp_path / "out"
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    flags = ["--held-bytes", "2000", "--bpe-size", "300"]
    monkeypatch.setattr(sys, "argv", ["novels.py", str(out), *files, *flags])
    novels.main()
    found = {split: text_of(out, split) for split in ("train", "validation", "test")}
    assert sum(text.count("Title ") for text in found.values()) == 8
    for n in range(8):
        assert sum(f"Title {n}\n" in text for text in found.values()) == 1
        assert sum(story(n, 300) in text for text in found.values()) == 1


def test_code_is_held_out_by_package_and_copies_leave_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    sources = {
        name: "\n".join(f"def {name}_{i}(argument):\n    return argument" for i in range(40)) for name in "abcdef"
    }
    for name, source in sources.items():
        (site / name).mkdir(parents=True)
        (site / name / "one.py").write_text(source)
        vendored = sources["a" if name == "f" else "f"]  # everybody has a copy of f, and f one of a
        (site / name / "vendored.py").write_text(vendored)
        (site / name / "table.py").write_text(f"x = [{', '.join(map(str, range(500)))}]\n")
        (site / f"{name}-1.dist-info").mkdir()
        (site / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        rows = [f"{name}/{file}.py,," for file in ("one", "vendored", "table")]
        (site / f"{name}-1.dist-info" / "RECORD").write_text("\n".join(rows))
    out = tmp_path / "out"
    flags = ["--held-bytes", "1000", "--bpe-size", "300", "--exclude", "e"]
    monkeypatch.setattr(sys, "argv", ["code_corpus.py", str(out), str(site), *flags])
    code_corpus.main()
    found = {split: text_of(out, split) for split in ("train", "validation", "test")}
    for name, source in sources.items():
        holders = [split for split, text in found.items() if source in text]
        assert len(holders) == (0 if name == "e" else 1), "one copy of each file, in one split"
    assert not any("x = [" in text for text in found.values())
    assert all(f"# file: {name}/one.py" in "".join(found.values()) for name in "bcd")
