"""One text that is being written: what was asked, the tokens so far, and the pieces of text that are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prism.language.generate import LanguageModel, Sampling
from prism.language.tokenizer import TextStream
from prism.serve.lm.stops import StopStrings

Finish = Literal["stop", "length"]
"""Why a text has ended: its end token or a stop string, or the most tokens."""


@dataclass(frozen=True)
class Order:
    """How a text is to be written.

    Args:
        max_tokens: most tokens to write.
        ends: tokens that end the text; they are not part of it.
        stop: strings that end the text; they are not part of it either.
        logprobs: how many of the most likely tokens to report with each token; None: no probabilities at all.
    """

    sampling: Sampling
    seed: int
    max_tokens: int
    ends: frozenset[int]
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenProbability:
    """A written token, its log-probability, and those of the most likely tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """A piece of one of a request's texts.

    Args:
        choice: which of the request's texts.
        finish: why the text ends with this piece; None while it continues.
    """

    choice: int
    text: str
    tokens: tuple[TokenProbability, ...] = ()
    finish: Finish | None = None


class Writer:
    """Write one text, token by token.

    Args:
        send: called with every piece.
    """

    def __init__(self, lm: LanguageModel, order: Order, choice: int, send: Callable[[Piece], None]) -> None:
        self.lm, self.order, self.choice, self._send = lm, order, choice, send
        self.random = torch.Generator().manual_seed(order.seed)
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._text, self._stops = TextStream(lm.tokenizer), StopStrings(order.stop)
        self._unsent: list[TokenProbability] = []

    @property
    def last(self) -> int:
        """The token that is to be read next."""
        return self.tokens[-1]

    def choose(self, logits: Tensor) -> None:
        """Choose the next token by its logits `[V]`, as `prism generate` does, write it, and send what can be sent."""
        logits = logits[: self.lm.tokenizer.size]
        token = self.order.sampling.choose(logits, self.random)
        if token in self.order.ends:
            self._end("stop")
            return
        self.tokens.append(token)
        if self.order.logprobs is not None:
            self._unsent.append(probability(token, logits, self.order.logprobs))
        text = self._stops.push(self._text.push(token))
        if self._stops.found:
            self._end("stop", text)
        elif len(self.tokens) >= self.order.max_tokens:
            self._end("length", text)
        elif text:
            self._emit(Piece(self.choice, text, tuple(self._unsent)))

    def end_if_nothing_is_asked(self) -> None:
        """End a text of at most 0 tokens."""
        if self.order.max_tokens == 0:
            self._end("length")

    def _end(self, why: Finish, text: str = "") -> None:
        self.finish = why
        if not self._stops.found:
            text += self._stops.push(self._text.flush())
            text += self._stops.flush()
        self._emit(Piece(self.choice, text, tuple(self._unsent), "stop" if self._stops.found else why))

    def _emit(self, piece: Piece) -> None:
        self._unsent.clear()
        self._send(piece)


def probability(token: int, logits: Tensor, top: int) -> TokenProbability:
    """The probability of a token by its logits `[V]`, before temperature and filters."""
    logs = logits.float().log_softmax(-1)
    values, places = logs.topk(min(top, len(logs)))
    return TokenProbability(token, float(logs[token]), tuple(zip(places.tolist(), values.tolist(), strict=True)))
