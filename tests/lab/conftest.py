"""Prepared tokens of a tiny text."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from prism.language.corpus import write_splits
    from prism.language.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("tokens")
    lines = [
        f"the {a} {b} sat on the {c}. " for a in ("old", "new") for b in ("cat", "dog") for c in ("mat", "bed", "hat")
    ]
    splits = {
        "train": ["".join(lines[i % 12 :] + lines[: i % 12]) for i in range(20)],
        "validation": ["".join(lines[::-1]), "".join(lines[::7])],
        "test": ["".join(lines[::5]) * 4, "the cat"],
    }
    write_splits(folder, splits, train_bpe(splits["train"], 300))
    return folder
