"""Read texts in one fixed way, so that what a model makes of a text does not depend on how the text came.

The same tokens, read in other pieces, give the same numbers only up to rounding. So every text is read in segments that
start at multiples of one length, counted from its first token, as `prism generate` reads a prompt:

    tokens    0 ………… 256 ………… 512 ……… 600          kept of this text: the memory after 512 tokens, and tokens 512 to 599

A `Text` is the memory after its last whole segments and the tokens after them. To continue it, those few tokens are read
again, together with the new ones. Continuing is therefore the same computation as reading everything at once, bit for bit.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prism.language.generate import LanguageModel
from prism.models import PrismCache

Key = bytes
"""Hash of the tokens of whole segments."""


@dataclass(frozen=True)
class Text:
    """A text that was read: the memory after its first `start` tokens, and the tokens after them.

    Args:
        cache: the memory; None at the start of a text. Never changed: reading makes a copy.
        start: number of tokens that the memory has read, whole segments.
        tail: the tokens after these, at most a segment once the text is read.
        key: hash of the tokens that the memory has read.
        documents: whether the end token opens a new document; in chats it ends a message.
    """

    cache: PrismCache | None = None
    start: int = 0
    tail: tuple[int, ...] = ()
    key: Key = b""
    documents: bool = True

    def __len__(self) -> int:
        return self.start + len(self.tail)

    def followed_by(self, tokens: Sequence[int]) -> Text:
        """The text with more tokens, which are not read yet."""
        return replace(self, tail=(*self.tail, *tokens))


class Reading:
    """Read a text, one segment at a call; then `text`, `logits` and `cache` are there.

    Args:
        text: its tail may have any length, at least one token.
        prefixes: where memories of earlier texts are found and kept.
    """

    def __init__(self, lm: LanguageModel, text: Text, prefixes: PrefixCache) -> None:
        if not text.tail:
            raise ValueError("a text of at least one token is needed")
        self._reader = lm.reader()
        self._reader.documents = text.documents
        self.prefixes, self.segment = prefixes, self._reader.segment
        self.text = prefixes.find(text, self.segment)
        if self.text.cache is not None:
            self._reader.cache = self.text.cache.copy()
        self.reused = self.text.start
        """Number of tokens that need not be read, because memories of them were kept."""
        self.logits: Tensor | None = None
        """Logits `[V]` of the next token; None until all is read."""

    @property
    def cache(self) -> PrismCache:
        """The memory after the last token that was read."""
        return self._reader.cache

    @property
    def settled(self) -> bool:
        """Whether all whole segments are read, so that the text can be kept."""
        return len(self.text.tail) <= self.segment

    @property
    def done(self) -> bool:
        """Whether all is read."""
        return self.logits is not None

    def read_segment(self) -> None:
        """Read the next segment."""
        text = self.text
        part, rest = text.tail[: self.segment], text.tail[self.segment :]
        logits = self._reader.read_all(torch.tensor(part))
        if not rest:  # the tail stays in the text, to be read again with what follows
            self.logits = logits
            return
        key = next_key(text.key, part, text.documents)
        self.text = replace(text, cache=self.cache.copy(), start=text.start + len(part), tail=rest, key=key)
        self.prefixes.keep(self.text)


def next_key(key: Key, tokens: Sequence[int], documents: bool) -> Key:
    """The hash of all tokens up to the end of this segment, by the hash up to its start."""
    return hashlib.sha256(key + bytes([documents]) + np.asarray(tokens, dtype="<i8").tobytes()).digest()


class PrefixCache:
    """Memories after whole segments of texts that were read, for texts that start in the same way.

    The least recently used are dropped first. All methods may be called from any thread.

    Args:
        limit: most bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes = limit, 0
        self._kept: OrderedDict[Key, Text] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, text: Text, segment: int) -> Text:
        """The same text with the latest memory that is kept. The last token is always left to read: it gives the logits."""
        key, found, keys = text.key, text, []
        for begin in range(0, len(text.tail) - segment, segment):
            key = next_key(key, text.tail[begin : begin + segment], text.documents)
            keys.append(key)
        with self._lock:
            for i, key in reversed(list(enumerate(keys, 1))):
                if (kept := self._kept.get(key)) is not None:
                    self._kept.move_to_end(key)
                    found = replace(kept, tail=text.tail[i * segment :])
                    break
        return found

    def keep(self, text: Text) -> None:
        """Keep the memory of a text."""
        assert text.cache is not None
        size = text.cache.nbytes
        if size > self.limit:
            return
        with self._lock:
            if text.key not in self._kept:
                self.nbytes += size
            self._kept[text.key] = replace(text, tail=())
            self._kept.move_to_end(text.key)
            while self.nbytes > self.limit:
                _, oldest = self._kept.popitem(last=False)
                assert oldest.cache is not None
                self.nbytes -= oldest.cache.nbytes
