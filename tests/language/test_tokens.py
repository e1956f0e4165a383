"""Tokens on disk: prepared once, the same for every process, verified before use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.language import corpus as preparation
from prism.language.corpus import Recipe, _Source, prepare
from prism.language.settings import DataSettings
from prism.language.tokens import Manifest, Sequences, Split, Stream, StreamWriter
from tests.train.runs import write_corpus


@given(
    parts=st.lists(st.lists(st.integers(0, 65535), max_size=12), max_size=8), shard=st.integers(1, 9), data=st.data()
)
def test_what_is_written_over_shards_is_read_back(tmp_path_factory: pytest.TempPathFactory, parts, shard, data) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    everything = [token for part in parts for token in part]
    writer = StreamWriter(folder, "train", np.dtype("<u2"), shard)
    for part in parts:
        writer.append(np.array(part, dtype=np.int64))
    shards = writer.close()
    assert writer.tokens == len(everything) == sum(s.tokens for s in shards)
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)))
    split = Split("train", start, stop, 0, 0)
    stream = Stream(folder, Manifest("<u2", 65536, 0, "", "", {"train": shards}, {"train": split}), "train")
    assert stream.read(0, len(stream)).tolist() == everything[start:stop]
    middle = (stop - start) // 2
    assert stream.read(middle, stop - start).tolist() == everything[start + middle : stop]
    with pytest.raises(ValueError, match="outside"):
        stream.read(0, len(stream) + 1)


def documents_of(stream: Stream, end: int) -> list[bytes]:
    tokens = stream.read(0, len(stream))
    assert tokens[-1] == end
    return [
        bytes(document.tolist())
        for document in np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
        for document in [document[:-1]]
    ]


def test_every_document_goes_to_one_split_and_ends(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus")
    corpus = prepare(Recipe((str(source),), validation=0.02), tmp_path / "cache")
    rows = [json.loads(line)["text"].encode() for line in (source / "songs.jsonl").read_text().splitlines()]
    train, held_out = (documents_of(corpus.stream(name), corpus.manifest.end) for name in ("train", "validation"))
    assert held_out == rows[49::50], "every 50th document"
    assert train == [row for i, row in enumerate(rows) if i % 50 != 49]
    for split, documents in (("train", train), ("validation", held_out)):
        counts = corpus.manifest.splits[split]
        assert (counts.documents, counts.text_bytes) == (len(documents), sum(map(len, documents)))


def test_a_single_text_gives_up_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 20)
    corpus = prepare(Recipe((str(path),), validation=0.1), tmp_path / "cache")
    train, tail = (corpus.stream(name).read(0, len(corpus.stream(name))) for name in ("train", "validation"))
    assert len(tail) == 20 and bytes(np.concatenate([train, tail])[:-1].tolist()) == path.read_bytes()


def test_tokens_are_made_once_and_again_when_the_text_or_the_recipe_changes(tmp_path: Path, monkeypatch) -> None:
    source = write_corpus(tmp_path / "corpus")
    recipe, cache = Recipe((str(source),)), tmp_path / "cache"
    first = prepare(recipe, cache)
    monkeypatch.setattr(preparation, "_write", lambda *_: pytest.fail("tokens were made twice"))
    assert prepare(recipe, cache).manifest == first.manifest
    monkeypatch.undo()
    (source / "more.txt").write_text("one more document")
    assert prepare(recipe, cache).manifest.digest != first.manifest.digest
    assert prepare(Recipe((str(source),), split="tail"), cache).folder != prepare(recipe, cache).folder
    assert prepare(Recipe((str(source),), max_bytes=1000), cache).manifest.splits["train"].text_bytes < 1100


def test_a_preparation_that_was_cut_off_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    append, calls = StreamWriter.append, iter(range(100))

    def broken(self: StreamWriter, tokens: np.ndarray) -> None:
        if next(calls) == 50:
            raise OSError(28, "No space left on device")
        append(self, tokens)

    monkeypatch.setattr(StreamWriter, "append", broken)
    with pytest.raises(OSError, match="No space left"):
        prepare(Recipe((str(source),)), cache)
    monkeypatch.undo()
    assert list((cache / "tokens").glob(".*.partial")), "something was left behind"
    corpus = prepare(Recipe((str(source),)), cache)
    assert corpus.manifest == prepare(Recipe((str(source),)), tmp_path / "other").manifest
    assert not list((cache / "tokens").glob(".*.partial"))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_tokens_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    recipe = Recipe((str(write_corpus(tmp_path / "corpus")),))
    shard = prepare(recipe, tmp_path / "cache").folder / "train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "flip" else content[:-2])
    with pytest.raises(ValueError, match=rf"train-00000\.bin is {'missing' if damage == 'remove' else 'damaged'}"):
        prepare(recipe, tmp_path / "cache")


def test_the_key_of_a_cache_depends_on_the_recipe_alone() -> None:
    recipe = DataSettings(("hub:owner/dataset",), bpe_size=300, context=7, verify=False).recipe()
    assert recipe == Recipe(("hub:owner/dataset",), bpe_size=300)
    assert _Source(recipe).key() == "e66c06651be0c0a06abf"


def test_bad_recipes_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"no text in .*empty\.txt: the corpus is empty"):
        prepare(Recipe((str(empty),)), tmp_path / "cache")
    empty.write_text("a")
    with pytest.raises(ValueError, match="too few"):
        prepare(Recipe((str(empty),)), tmp_path / "cache")
    with pytest.raises(ValueError, match="1 documents, too few to hold out 1 in 100"):
        prepare(Recipe((str(empty),), split="document"), tmp_path / "cache")
    with pytest.raises(ValueError, match="mixes files with hub datasets"):
        prepare(Recipe((str(empty), "hub:a/b")), tmp_path / "cache")
    for wrong, message in (
        ({"validation": 0.0}, "validation"),
        ({"split": "x"}, "split"),
        ({"max_bytes": 0}, "max_bytes"),
    ):
        with pytest.raises(ValueError, match=f"data.{message} must be"):
            prepare(Recipe(**wrong), tmp_path / "cache")


def test_sequences_overlap_by_the_token_to_predict_and_mark_document_starts(tmp_path: Path) -> None:
    corpus = prepare(Recipe((str(write_corpus(tmp_path / "corpus")),)), tmp_path / "cache")
    stream, end = corpus.stream("train"), corpus.manifest.end
    sequences = Sequences(stream, 16, end)
    assert len(sequences) == (len(stream) - 1) // 16
    batch = sequences.batch(np.arange(len(sequences)))
    flat = stream.read(0, len(sequences) * 16 + 1)
    assert batch.inputs.flatten().tolist() == flat[:-1].tolist()
    assert batch.targets.flatten().tolist() == flat[1:].tolist()
    assert batch.reset.flatten().tolist() == (flat[:-1] == end).tolist() and batch.reset.sum() > 10
    assert Sequences(stream, 16).batch(np.array([3])).reset is None
    with pytest.raises(ValueError, match=f"the data has {len(stream)} tokens, too few for a context of 10000000 "):
        Sequences(stream, 10_000_000)
