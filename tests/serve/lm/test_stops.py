"""Stop strings end a text at the same place however the text is cut, and nothing of them is sent."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prism.serve.lm.stops import StopStrings

LETTERS = st.text("ab", max_size=12)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 12), max_size=6))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    finder, sent = StopStrings(stops), ""
    # By definition: the text up to the end of the first piece with which a stop string is complete, cut before it.
    expected, found = text, False
    for end in places[1:]:
        found = any(stop in text[:end] for stop in stops)
        if found:
            expected = text[: min(text[:end].find(stop) for stop in stops if stop in text[:end])]
            break
    for piece in pieces:
        sent += finder.push(piece)
        assert expected.startswith(sent)
    assert finder.found == found
    assert sent + finder.flush() == expected


def test_what_cannot_be_a_stop_string_is_sent_at_once() -> None:
    finder = StopStrings(["\n\n"])
    assert [finder.push(piece) for piece in ("a", "b\n", "c", "\n", "\n", "d")] == ["a", "b", "\nc", "", "", ""]
