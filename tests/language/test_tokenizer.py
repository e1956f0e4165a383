"""Every text survives encoding and decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.language.tokenizer import END, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

TEXT = ["The cat sat on the mat. " * 30, "def f(x):\n    return x\n" * 30, "naïve café, 日本語, 🙂\n" * 10]
BYTES, BPE = ByteTokenizer(), train_bpe(TEXT, 400)


@given(st.text(max_size=60), st.sampled_from([BYTES, BPE]))
def test_round_trip(text: str, tokenizer: Tokenizer) -> None:
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < tokenizer.size and token != tokenizer.end for token in tokens)


@given(st.text(max_size=60))
def test_the_fast_path_for_bytes_gives_what_its_definition_gives(text: str) -> None:
    assert BYTES.encode([text])[0].tolist() == Tokenizer.encode(BYTES, [text])[0].tolist() == list(text.encode())


def test_a_marker_in_the_text_is_text() -> None:
    text = f"before {END} after"
    for tokenizer in (BYTES, BPE):
        (tokens,) = tokenizer.encode([text])
        assert tokenizer.end not in tokens and tokenizer.decode(tokens) == text


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_half_a_character_is_refused_in_a_sentence(tokenizer: Tokenizer) -> None:
    wanted = "the text cannot be encoded as UTF-8: surrogates not allowed at 1; give text in UTF-8"
    with pytest.raises(ValueError, match=wanted):
        tokenizer.encode(["a", "b\ud800"])
    with pytest.raises(ValueError, match=wanted):
        tokenizer.encode_marked("b\ud800")


def test_bpe_compresses_and_is_the_same_every_time() -> None:
    assert BPE.size <= 400 and len(BPE.encode(TEXT[:1])[0]) < len(TEXT[0]) / 2
    assert train_bpe(TEXT, 400).definition == BPE.definition


def test_a_saved_tokenizer_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE.definition, encoding="utf-8")
    again = load_tokenizer(path)
    assert (again.end, again.end_token, again.size) == (BPE.end, END, BPE.size)
    assert again.encode(TEXT)[1].tolist() == BPE.encode(TEXT)[1].tolist()


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer file"):
        load_tokenizer(tmp_path / "missing.json")
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_tokenizer(wrong)
    wrong.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        load_tokenizer(wrong)
    with pytest.raises(ValueError, match="no token '<eot>'"):
        Tokenizer(BPE.definition, "<eot>")
    with pytest.raises(ValueError, match="give its end token"):
        Tokenizer(BPE.definition.replace(END, "<|fin|>"))
    with pytest.raises(ValueError, match="at least 257"):
        train_bpe(TEXT, 100)
