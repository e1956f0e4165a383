"""Perplexity against a direct computation: the whole document in one pass, and every context separately."""

from __future__ import annotations

import json
import lzma
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from prism.language.generate import LanguageModel, open_model
from prism.language.perplexity import Context, Tally, count_bytes, score_file
from prism.language.tokenizer import Tokenizer, train_bpe
from tests.tiny_lm import save_lm

TEXTS = [
    "naïve café 🙂\nsecond line, a little longer than the first\n",
    "b",
    "the cat sat on the mat and said nothing. " * 4,
]


@pytest.fixture(scope="module", params=["prism*2", "prism+softmax", "bpe"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    tokenizer: Tokenizer | None = train_bpe(TEXTS, 300) if request.param == "bpe" else None
    layers = "gated_delta" if request.param == "bpe" else request.param
    return open_model(save_lm(tmp_path_factory.mktemp("lm"), layers, tokenizer), "cpu")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@torch.no_grad()
def direct(lm: LanguageModel, inputs: list[int], targets: list[int]) -> torch.Tensor:
    """Nats of each target, from memories that are empty at first and at every end token, which opens a document."""
    ends = [i for i, token in enumerate(inputs) if token == lm.tokenizer.end]
    cuts = sorted({0, *ends, len(inputs)})
    nats = []
    for start, stop in pairwise(cuts):
        logits = lm.model(torch.tensor([inputs[start:stop]]), use_cache=False).logits[0]
        nats.append(-logits.log_softmax(-1)[torch.arange(stop - start), targets[start:stop]])
    return torch.cat(nats)


def stream(lm: LanguageModel, texts: list[str]) -> list[int]:
    end = lm.tokenizer.end
    return [end, *(token for text in texts for token in (*lm.tokenizer.encode([text])[0].tolist(), end))]


@pytest.mark.parametrize("segment", [1, 7, 64, 2048])
def test_through_the_state_equals_one_pass(lm: LanguageModel, rows: Path, segment: int) -> None:
    """Wherever segments are cut: every token is predicted from all of its document, and from nothing else."""
    tokens = stream(lm, TEXTS)
    expected = direct(lm, tokens[:-1], tokens[1:])
    result = score_file(lm, rows, Context(segment=segment)).result()
    assert result["tokens"] == len(expected)
    assert result["nats_per_token"] == pytest.approx(expected.double().mean().item(), rel=1e-5)


@pytest.mark.parametrize(("context", "stride", "batch"), [(16, 16, 4), (16, 5, 4), (9, 3, 3), (2, 1, 8), (4000, 7, 2)])
def test_windows_equal_each_window_by_itself(
    lm: LanguageModel, rows: Path, context: int, stride: int, batch: int
) -> None:
    tokens = stream(lm, TEXTS)
    total, counted, start = 0.0, 0, 0
    while counted < len(tokens) - 1:
        nats = direct(lm, tokens[:-1][start : start + context], tokens[start + 1 : start + context + 1])
        new = nats[counted - start :]
        total, counted, start = total + new.double().sum().item(), counted + len(new), start + stride
    result = score_file(lm, rows, Context(context, stride, batch=batch))
    assert result.tokens == counted == len(tokens) - 1
    assert result.nats == pytest.approx(total, rel=1e-5)


def test_more_context_changes_the_result(lm: LanguageModel, rows: Path) -> None:
    """Otherwise the tests above could not distinguish the ways of reading."""
    nats = {score_file(lm, rows, how).nats for how in (Context(), Context(16), Context(16, 4), Context(1))}
    assert len(nats) == 4


def test_bits_per_byte_and_perplexity(lm: LanguageModel, rows: Path) -> None:
    tally = score_file(lm, rows)
    result = tally.result()
    size = sum(len(text.encode()) for text in TEXTS)
    assert result["text_bytes"] == size == count_bytes(rows)
    assert result["documents"] == len(TEXTS)
    assert result["bits_per_byte"] == pytest.approx(tally.nats / math.log(2) / size)
    assert result["perplexity"] == pytest.approx(math.exp(tally.nats / tally.tokens))
    words = sum(len(text.split()) for text in TEXTS)
    assert result["words"] == words and words < tally.tokens
    assert result["perplexity_per_word"] == pytest.approx(math.exp(tally.nats / words))


def test_text_without_words_has_no_perplexity_per_word() -> None:
    assert Tally(nats=3.0, tokens=2, text_bytes=2, documents=1).result()["perplexity_per_word"] is None


def test_files_add_up(lm: LanguageModel, tmp_path: Path, rows: Path) -> None:
    total = Tally()
    for i, text in enumerate(TEXTS):
        path = tmp_path / f"{i}.txt.xz"
        path.write_bytes(lzma.compress(text.encode()))
        total.add(score_file(lm, path))
    assert total.result() == pytest.approx(score_file(lm, rows).result(), rel=1e-5)


def test_long_files_are_read_in_pieces(
    lm: LanguageModel, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of many pieces, each a few segments or less, is one document."""
    path = tmp_path / "long.txt"
    path.write_text(TEXTS[0] * 5)
    monkeypatch.setattr("prism.language.text.PIECE_BYTES", 100)
    pieces = [line + "\n" for line in (TEXTS[0] * 5).splitlines()]
    tokens = [token for text in pieces for token in lm.tokenizer.encode([text])[0].tolist()]
    end = lm.tokenizer.end
    expected = direct(lm, [end, *tokens], [*tokens, end])
    tally = score_file(lm, path, Context(segment=32))
    if lm.tokenizer.size == 257:  # other tokenizers may join across lines
        assert tally.tokens == len(expected)
        assert tally.nats == pytest.approx(expected.double().sum().item(), rel=1e-5)
    assert tally.documents == 1


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"there is no text in .*empty\.txt"):
        count_bytes(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 0xe9 at offset 3"):
        count_bytes(tmp_path / "latin.txt")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}')
    with pytest.raises(ValueError, match="has no text under 'text'"):
        count_bytes(tmp_path / "rows.jsonl")
    assert count_bytes(tmp_path / "rows.jsonl", "body") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context must be at least 1"),
        ({"context": 8, "stride": 9}, "stride is 9: it needs a context of at least that many"),
        ({"stride": 9}, "stride is 9: it needs a context"),
        ({"segment": 0}, "segment must be at least 1"),
    ],
)
def test_bad_contexts(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Context(**arguments)
