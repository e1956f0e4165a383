"""A text that is continued is the same computation as one that is read at once, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.language.generate import LanguageModel
from prism.serve.lm.text import PrefixCache, Reading, Text
from tests.serve.lm.models import model

SEGMENT = 256


def read(lm: LanguageModel, text: Text, prefixes: PrefixCache) -> Reading:
    reading = Reading(lm, text, prefixes)
    while not reading.done:
        reading.read_segment()
    return reading


@pytest.mark.parametrize("layers", ["prism*2", "softmax"])
@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 100, 255, 256, 257, 300]), min_size=1, max_size=4), st.integers(0, 1000))
def test_continuing_equals_reading_at_once(layers: str, lengths: list[int], seed: int) -> None:
    lm, none = model(layers), PrefixCache(0)
    assert lm.reader().segment == SEGMENT
    tokens = torch.randint(256, (sum(lengths),), generator=torch.Generator().manual_seed(seed)).tolist()
    text, at = Text(), 0
    for length in lengths:
        reading = read(lm, text.followed_by(tokens[at : at + length]), none)
        text, at = reading.text, at + length
        assert len(text) == at and 1 <= len(text.tail) <= SEGMENT
    whole = read(lm, Text().followed_by(tokens), none)
    assert reading.logits is not None and whole.logits is not None
    assert torch.equal(reading.logits, whole.logits) and text.key == whole.text.key
    session = model(layers).reader()
    assert torch.equal(session.read_all(torch.tensor(tokens)), whole.logits)  # as `prism generate` reads


def test_texts_that_start_alike_share_what_was_read() -> None:
    lm, prefixes = model(), PrefixCache(2**20)
    tokens = torch.randint(256, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    first = read(lm, Text().followed_by(tokens), prefixes)
    assert first.reused == 0 and len(prefixes) == 2
    other = Text().followed_by([*tokens[:600], 1, 2, 3])
    second = read(lm, other, prefixes)
    alone = read(lm, other, PrefixCache(0))
    assert second.reused == 512 and second.logits is not None and alone.logits is not None
    assert torch.equal(second.logits, alone.logits)
    assert read(lm, Text().followed_by(tokens[:512]), prefixes).reused == 256  # the last segment gives the logits
    assert read(lm, Text(documents=False).followed_by(tokens), prefixes).reused == 0  # another way to read


def test_what_is_kept_of_texts_is_bounded_and_the_oldest_is_dropped() -> None:
    lm = model()
    size = read(lm, Text().followed_by([1] * 300), PrefixCache(0)).text.cache.nbytes
    prefixes = PrefixCache(2 * size)
    texts = [Text().followed_by([i] * 257) for i in range(3)]
    read(lm, texts[0], prefixes)
    read(lm, texts[1], prefixes)
    read(lm, texts[0], prefixes)  # used again
    read(lm, texts[2], prefixes)
    assert len(prefixes) == 2 and prefixes.nbytes == 2 * size
    assert [read(lm, text, prefixes).reused for text in (texts[0], texts[1])] == [256, 0]
