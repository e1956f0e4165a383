"""Text from tokens that come one at a time: what can be shown now, and nothing that a later token would change."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Protocol

from prism.data.tokenizer import Tokenizer, byte_alphabet


class TextStream:
    """Joined, what `push` and at the end `flush` return is what the tokenizer makes of all tokens at once.

    Args:
        recent: what `recent` of an earlier stream was; this one goes on after it.
    """

    def __init__(self, tokenizer: Tokenizer, recent: Iterable[int] = ()) -> None:
        self._decoder: _Decoder = (
            _ByteDecoder(tokenizer) if _is_byte_level(tokenizer.definition) else _OtherDecoder(tokenizer)
        )
        self._shown: list[int] = []
        self._waiting: list[int] = []
        for token in recent:
            self.push(token)

    @property
    def recent(self) -> list[int]:
        """The tokens that what comes next may depend on: those behind the text shown last, and those not shown yet."""
        return self._shown + self._waiting

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        self._waiting.append(int(token))
        text = self._decoder.push(int(token))
        if text:
            self._shown, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """What an unfinished character looks like if nothing follows."""
        return self._decoder.flush()


class _Decoder(Protocol):
    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """Tokens are byte strings: exact for any bytes, also for those that no text has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer as Fast

        self._name = Fast.from_str(tokenizer.definition).id_to_token
        self._bytes = {character: byte for byte, character in enumerate(byte_alphabet())}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        name = self._name(token) or ""
        written_out = all(character in self._bytes for character in name)  # an added token need not be
        return self._utf8.decode(bytes(self._bytes[c] for c in name) if written_out else name.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _OtherDecoder:
    """Tokens mean something only together (spaces between words, say); the tokenizers library keeps track."""

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


def _is_byte_level(definition: str) -> bool:
    decoder = json.loads(definition).get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] == ["ByteLevel"]
