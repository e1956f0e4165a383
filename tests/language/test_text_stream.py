"""Streamed text equals the decoded text, for all tokens and pieces, and never shows half a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.language.tokenizer import ByteTokenizer, TextStream, Tokenizer, train_bpe

SENTENCES = [
    "naïve café, 10 € für 東京 🙂🙃 – über alles",
    "the cat sat on the mat; the cat sat on the mat",
    "ÀÉÎõü 水水水水 🙂🙂",
]


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return train_bpe(SENTENCES, 320)
    return _with_spaces_between_words()


def _with_spaces_between_words() -> Tokenizer:
    """Of the kind that Llama models have: ▁ for a space, bytes for characters it does not know, no space in front."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers

    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "th",
        "▁c",
    ]
    fast = Fast(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[("t", "h"), ("▁", "c")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(fast.to_str())


def streamed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


@given(st.lists(st.integers(0, 256) | st.integers(0xC0, 0xFF), max_size=30), st.sampled_from(["bytes", "bpe"]))
def test_any_tokens_give_what_the_tokenizer_gives(tokens: list[int], kind: str) -> None:
    """Also bytes that are no text: each unfinished or impossible character is shown as one �, as everywhere."""
    chosen = tokenizer(kind)
    assert "".join(streamed(TextStream(chosen), tokens)) == chosen.decode(tokens)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
@given(text=st.text(st.sampled_from("abct é€東🙂"), min_size=1, max_size=20) | st.sampled_from(SENTENCES))
def test_characters_come_whole(kind: str, text: str) -> None:
    chosen = tokenizer(kind)
    (tokens,) = chosen.encode([text])
    pieces = streamed(TextStream(chosen), tokens.tolist())
    assert "".join(pieces) == chosen.decode(tokens)
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
@given(text=st.text(st.sampled_from("abct é€東🙂"), min_size=1, max_size=20) | st.sampled_from(SENTENCES))
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    chosen = tokenizer(kind)
    tokens = chosen.encode([text])[0].tolist()
    found = [chosen.token_bytes(token, first=place == 0) for place, token in enumerate(tokens)]
    assert b"".join(found) == chosen.decode(tokens).encode()
    assert chosen.token_bytes(chosen.end) == chosen.end_token.encode()


def test_an_unfinished_character_waits_for_its_last_byte() -> None:
    stream = TextStream(tokenizer("bytes"))
    assert [stream.push(byte) for byte in "€".encode()] == ["", "", "€"]
    assert stream.push(0xE2) == ""
    assert stream.flush() == "�"


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
@pytest.mark.parametrize("text", SENTENCES)
def test_a_stream_goes_on_after_any_token(kind: str, text: str) -> None:
    chosen = tokenizer(kind)
    tokens = chosen.encode([text])[0].tolist()
    for cut in range(len(tokens)):
        first = TextStream(chosen)
        before = [first.push(token) for token in tokens[:cut]]
        after = streamed(TextStream(chosen, first.recent), tokens[cut:])
        assert "".join(before + after) == chosen.decode(tokens), cut


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_a_stream_stopped_after_every_token(kind: str) -> None:
    chosen = tokenizer(kind)
    stream, pieces = TextStream(chosen), []
    tokens = chosen.encode([SENTENCES[0]])[0].tolist()
    for token in tokens:
        pieces.append(stream.push(token))
        stream = TextStream(chosen, stream.recent)
    assert "".join(pieces) == chosen.decode(tokens)
