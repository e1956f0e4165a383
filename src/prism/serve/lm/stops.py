"""Find stop strings in text that comes in pieces: nothing of one is ever sent, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Pass text on until one of the stop strings is complete.

    Args:
        stops: non-empty strings; the text ends before the first that occurs.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = tuple(stops)
        self.held = ""
        """The end of the text so far that may be the start of a stop string."""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can be sent now; after a stop string was found, nothing."""
        if self.found:
            return ""
        text = self.held + piece
        places = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if places:
            self.found, self.held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, once no more follows."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is the start of the stop string, without all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
