"""Loss by position and on repeated rare bigrams, against the definitions written as loops."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from prism.language.breakdown import (
    WANTED,
    Breakdown,
    History,
    bigrams,
    count_bigrams,
    head_nats,
    training_counts,
)
from prism.language.corpus import Corpus, open_corpus, write_splits
from prism.language.generate import open_model
from prism.language.perplexity import Context, score_file
from prism.language.tokenizer import ByteTokenizer
from tests.helpers import examples
from tests.tiny_lm import save_lm

END = 0


def by_definition(tokens: list[int], end: int | None) -> tuple[list[int], list[bool]]:
    """Position of every prediction, and whether it repeats a bigram of its document."""
    positions, repeats = [], []
    length, seen = 0, set[tuple[int, int]]()
    for first, second in pairwise(tokens):
        if first == end:
            length, seen = 0, set()
        length += 1
        positions.append(length)
        repeats.append((first, second) in seen)
        seen.add((first, second))
    return positions, repeats


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.lists(st.integers(1, 9), min_size=1, max_size=10),
    st.sampled_from([END, None]),
)
@examples(60)
def test_a_history_in_segments_equals_the_definition(tokens: list[int], lengths: list[int], end: int | None) -> None:
    expected = by_definition(tokens, end)
    history, start, positions, repeats = History(end), 0, list[int](), list[bool]()
    for number in range(len(tokens)):
        stop = min(start + lengths[number % len(lengths)], len(tokens) - 1)
        if start == stop:
            break
        found = history.read(np.array(tokens[start:stop]), np.array(tokens[start + 1 : stop + 1]))
        positions += found[0].tolist()
        repeats += found[2].tolist()
        start = stop
    assert (positions, repeats) == expected


def test_bins_end_at_powers_of_two() -> None:
    tokens = np.arange(1, 19)
    found = Breakdown()
    found.add(History(END), tokens[:-1], tokens[1:], np.arange(17.0))
    assert [(part["up_to"], part["tokens"]) for part in found.positions()] == [
        (1, 1),
        (2, 1),
        (4, 2),
        (8, 4),
        (16, 8),
        (32, 1),
    ]
    assert [part["nats_per_token"] for part in found.positions()] == [0.0, 1.0, 2.5, 5.5, 11.5, 16.0]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    texts = {"train": ["abab abab xyz", "ab ab"], "validation": ["no"], "test": ["ab xy ab xy ab zq zq"]}
    write_splits(tmp_path, texts, ByteTokenizer())
    return open_corpus(tmp_path)


def test_a_whole_cache_is_refused_with_the_folder_inside(tmp_path: Path) -> None:
    (tmp_path / "tokens" / "a1").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"give a folder of prepared tokens$"):
        open_corpus(tmp_path)
    (tmp_path / "tokens" / "a1" / "manifest.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"prepared tokens, such as .*a1$"):
        open_corpus(tmp_path)


def test_training_occurrences_are_counted(corpus: Corpus) -> None:
    stream = corpus.stream("train")
    tokens = stream.read(0, len(stream)).tolist()
    pairs = list(pairwise(tokens))
    asked = sorted({*pairs, (1, 2), (200, 255)})
    codes = bigrams(*np.array(asked).T)
    assert count_bigrams(stream, codes).tolist() == [pairs.count(pair) for pair in asked]


def test_counts_do_not_depend_on_the_pieces(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, counts = training_counts(corpus, "test")
    monkeypatch.setattr("prism.language.breakdown._AT_ONCE", 3)
    assert count_bigrams(corpus.stream("train"), codes).tolist() == counts.tolist()
    assert training_counts(corpus, "test")[1].tolist() == counts.tolist()  # from the file


@pytest.mark.parametrize("rare", [0, 1, 4])
def test_repeated_rare_bigrams_and_the_rest(corpus: Corpus, rare: int) -> None:
    """Every token is in one of the two parts, the rare ones by the definition."""
    stream = corpus.stream("test")
    tokens = stream.read(0, len(stream))
    nats = np.random.default_rng(0).random(len(tokens) - 1)
    found = Breakdown()
    found.add(History(corpus.manifest.end), tokens[:-1], tokens[1:], nats)
    training = corpus.stream("train")
    train = training.read(0, len(training)).tolist()
    pairs = list(pairwise(train))
    _, repeats = by_definition(tokens.tolist(), corpus.manifest.end)
    hit = [
        repeated and pairs.count((int(a), int(b))) <= rare
        for repeated, a, b in zip(repeats, tokens[:-1], tokens[1:], strict=True)
    ]
    result = found.rare_bigrams(*training_counts(corpus, "test"), rare)
    own = found.repeated_bigrams()
    assert result == found.rare_bigrams(own, count_bigrams(training, own), rare)
    assert result["repeated_rare"]["tokens"] == sum(hit) > 0
    assert result["repeated_rare"]["nats_per_token"] == pytest.approx(nats[hit].mean())
    assert result["rest"]["nats_per_token"] == pytest.approx(nats[~np.array(hit)].mean())
    assert result["rest"]["tokens"] == len(nats) - sum(hit)


@pytest.mark.parametrize("how", [Context(segment=7), Context(segment=64), Context(16, 5, batch=3), Context(9)])
def test_a_file_is_broken_down_as_it_is_scored(tmp_path: Path, how: Context) -> None:
    """The same total as without; in contexts, positions count from the start of each."""
    lm = open_model(save_lm(tmp_path / "lm"), "cpu")
    path = tmp_path / "rows.jsonl"
    texts = ["the cat sat on the mat, the cat sat", "b", "on the mat on the mat " * 3]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain, found = score_file(lm, path, how), Breakdown()
    tally = score_file(lm, path, how, breakdown=found)
    assert (tally.tokens, tally.text_bytes) == (plain.tokens, plain.text_bytes)
    assert tally.nats == pytest.approx(plain.nats, rel=1e-5)
    assert (found.total.tokens, found.total.nats) == (tally.tokens, pytest.approx(tally.nats, rel=1e-6))
    longest = max(len(text) for text in texts) + 1 if how.context is None else how.context
    last = found.positions()[-1]["up_to"]
    assert last // 2 < longest <= last


def test_nats_are_those_of_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = open_model(save_lm(tmp_path / "lm"), "cpu")
    monkeypatch.setattr("prism.language.breakdown._LOGITS", 5 * lm.model.config.vocab_size)  # slices of 5 rows
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = lm.model(tokens[:, :-1], **WANTED).hidden_states[-1]
        logits = lm.model(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(head_nats(lm.model, hidden, tokens[:, 1:]), expected, rtol=1e-5, atol=1e-5)
