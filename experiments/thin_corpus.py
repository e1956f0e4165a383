"""Keep every n-th training document of prepared tokens, for a machine that many tokens cannot reach.

    python experiments/thin_corpus.py data/code data/code-thin --every 2

Validation, test and tokenizer stay as they are. A run that reads the rest once sees no token twice.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from prism.files import commit_folder, fresh_folder
from prism.language.tokens import Manifest, StreamWriter


def thin(source: Path, out: Path, every: int) -> Manifest:
    """Write a folder with every n-th training document of `source`; replaces `out`."""
    manifest, partial = Manifest.load(source), fresh_folder(out.with_name(f".{out.name}.partial"))
    dtype = np.dtype(manifest.dtype)
    shards = manifest.streams["train"]
    tokens = np.concatenate([np.fromfile(source / shard.file, dtype) for shard in shards])
    documents = np.split(tokens, np.flatnonzero(tokens == manifest.end) + 1)[::every]
    writer = StreamWriter(partial, "train", dtype)
    for document in documents:
        writer.append(document)
    streams, split = {**manifest.streams, "train": writer.close()}, manifest.splits["train"]
    share = writer.tokens / split.tokens
    kept = replace(split, stop=writer.tokens, documents=len(documents), text_bytes=round(split.text_bytes * share))
    for file in source.iterdir():
        if file.name not in ("manifest.json", *(shard.file for shard in shards)):
            shutil.copy(file, partial)
    thinned = replace(manifest, streams=streams, splits={**manifest.splits, "train": kept})
    thinned.save(partial)
    commit_folder(partial, out)
    return thinned


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of prepared tokens")
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=2)
    arguments = parser.parse_args()
    found = thin(arguments.source, arguments.out, arguments.every).splits["train"]
    print(f"{found.documents:,} training documents, {found.tokens:,} tokens")
