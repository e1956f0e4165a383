"""Encode text as tokens and decode it: bytes (the default), a BPE trained on the data, or any `tokenizer.json`.

All three are saved as a `tokenizer.json`, so that any reader of a model can read its tokenizer. Markers such as `<|end|>`
inside the text are encoded as plain characters: only the end of a document ends one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

END = "<|end|>"
_KNOWN_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer:
    """A tokenizer and its end-of-document token.

    Args:
        definition: the text of a `tokenizer.json`.
        end_token: the token that ends a document; None: the first common name that the tokenizer has.
    """

    def __init__(self, definition: str, end_token: str | None = None) -> None:
        from tokenizers import Tokenizer as Fast

        self.definition = definition
        try:
            self._fast = Fast.from_str(definition)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ValueError(f"the tokenizer could not be loaded: {error}") from error
        self._fast.no_padding()
        self._fast.no_truncation()
        self._fast.encode_special_tokens = True
        self.end_token, self.end = self._find_end(end_token)
        self.size: int = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, pieces: list[str]) -> list[np.ndarray]:
        """The tokens of each piece, int64, without the special tokens that the tokenizer would add around a text."""
        try:
            encodings = self._fast.encode_batch(pieces, add_special_tokens=False)
        except TypeError:  # what tokenizers raises for half a character
            for piece in pieces:
                check_unicode(piece, "the text")
            raise
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_marked(self, text: str, plain: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text, int64 `[T]`, in which special tokens count as such, and where each is: int64 `[T, 2]`.

        The places are of its first character, and of the one after its last.

        Args:
            plain: take special tokens for plain characters, as `encode` does.
        """
        check_unicode(text, "the text")
        found = (self._fast if plain else self._marking).encode(text, add_special_tokens=False)
        offsets = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(found.ids, dtype=np.int64), offsets

    @cached_property
    def special_tokens(self) -> list[str]:
        """The texts of all special tokens."""
        added = self._fast.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @cached_property
    def _marking(self) -> Any:
        """The same tokenizer, which takes special tokens in a text for what they stand for."""
        from tokenizers import Tokenizer as Fast

        marking = Fast.from_str(self.definition)
        marking.no_padding()
        marking.no_truncation()
        return marking

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special tokens included."""
        text: str = self._fast.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text

    def token_bytes(self, token: int, first: bool = False) -> bytes:
        """The bytes that a token adds to a text in UTF-8, which may be a part of a character.

        Args:
            first: the text begins with it: some tokenizers omit a space there.
        """
        name: str = self._fast.id_to_token(int(token)) or ""
        if self.byte_level:
            return _shown_bytes(name)
        if "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])
        alone = self.decode([token])
        return (alone if first else self.decode([token, token]).removeprefix(alone)).encode()

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens stand for bytes and nothing else."""
        return self._decoders == ["ByteLevel"]

    @cached_property
    def _decoders(self) -> list[str | None]:
        """The kinds of the steps that make text of tokens."""
        decoder = json.loads(self.definition).get("decoder") or {}
        return [part.get("type") for part in decoder.get("decoders", [decoder])]

    def _find_end(self, wanted: str | None) -> tuple[str, int]:
        """Name and number of the end token."""
        for name in (wanted,) if wanted else _KNOWN_ENDS:
            if (number := self._fast.token_to_id(name)) is not None:
                return name, number
        if wanted:
            raise ValueError(f"the tokenizer has no token {wanted!r} to end a document with")
        raise ValueError(f"the tokenizer has none of {', '.join(_KNOWN_ENDS)}: give its end token with data.end_token")


class ByteTokenizer(Tokenizer):
    """Token b is byte b of the UTF-8 text; token 256 ends a document."""

    def __init__(self) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast

        fast = Fast(models.BPE(vocab={character: byte for byte, character in enumerate(byte_alphabet())}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        super().__init__(fast.to_str(pretty=True))

    def encode(self, pieces: list[str]) -> list[np.ndarray]:
        """The same tokens as the definition gives, without running it."""
        try:
            return [np.frombuffer(piece.encode(), dtype=np.uint8) for piece in pieces]
        except UnicodeEncodeError:
            return super().encode(pieces)  # says what is wrong


def check_unicode(text: str, what: str) -> None:
    """Raise ValueError for a text with half a character, as JSON (`"\\ud800"`) and words of a command line may hold.

    Args:
        what: the text in the message.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} cannot be encoded as UTF-8: {error.reason} at {error.start}; give text in UTF-8"
        ) from error


def load_tokenizer(path: Path, end_token: str | None = None) -> Tokenizer:
    """Read a `tokenizer.json`."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer file {path}: data.tokenizer is 'bytes', 'bpe' or a tokenizer.json"
        )
    try:
        definition = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    return Tokenizer(definition, end_token)


def train_bpe(pieces: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of `size` tokens (fewer if the text runs out of pairs). It can encode every text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Fast

    if size < 257:
        raise ValueError(f"data.bpe_size must be at least 257 (256 bytes and the end token), got {size}")
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(pieces, trainer)
    return Tokenizer(fast.to_str(pretty=True))


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte: the byte's own, or one from code point 256 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_alphabet())}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def _shown_bytes(name: str) -> bytes:
    """The bytes that the name of a byte-level token shows; an added token may have other characters."""
    return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else name.encode()


class TextStream:
    """Decode tokens one at a time, to text that no later token can change.

    The texts that `push` returns and the final `flush` are together what `Tokenizer.decode` gives for all tokens.

    Args:
        recent: `recent` of an earlier stream, to continue after it.
    """

    def __init__(self, tokenizer: Tokenizer, recent: Iterable[int] = ()) -> None:
        self._decoder: _Decoder = _ByteDecoder(tokenizer) if tokenizer.byte_level else _OtherDecoder(tokenizer)
        self._shown: list[int] = []
        self._waiting: list[int] = []
        for token in recent:
            self.push(token)

    @property
    def recent(self) -> list[int]:
        """The tokens that the next text may depend on: those of the last text returned, and those not returned yet."""
        return self._shown + self._waiting

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._waiting.append(int(token))
        text = self._decoder.push(int(token))
        if text:
            self._shown, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """The text of an incomplete character if no token follows."""
        return self._decoder.flush()


class _Decoder(Protocol):
    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """Tokens are byte strings: exact for any bytes, invalid UTF-8 included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer as Fast

        self._name = Fast.from_str(tokenizer.definition).id_to_token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(_shown_bytes(self._name(token) or ""))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _OtherDecoder:
    """Tokens depend on their neighbours (spaces between words, for example); the tokenizers library keeps track."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer as Fast
        from tokenizers.decoders import DecodeStream

        self._fast = Fast.from_str(tokenizer.definition)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        text: str | None = self._stream.step(self._fast, token)
        if text is None:
            return ""
        self._waiting = []
        return text

    def flush(self) -> str:
        text: str = self._fast.decode(self._waiting, skip_special_tokens=False)
        return text
