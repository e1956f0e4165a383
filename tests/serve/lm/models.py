"""Small language models, jobs without HTTP, and a service behind real HTTP, for the tests of `prism serve lm`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx

from prism.language.generate import LanguageModel, Sampling, Session, open_model
from prism.serve.lm.app import lm_app
from prism.serve.lm.scheduler import Job, Scheduler
from prism.serve.lm.service import LmService, open_service
from prism.serve.lm.settings import LmSettings
from prism.serve.lm.text import Text
from prism.serve.lm.writer import Order, Piece
from prism.serve.metrics import Metrics
from prism.serve.run import in_thread
from prism.serve.settings import ServerSettings
from tests.tiny_lm import save_lm

NAME = "tiny"


@cache
def folder(layers: str = "prism*2") -> Path:
    """A saved model of these layers."""
    return save_lm(Path(mkdtemp()) / NAME, layers)


@cache
def model(layers: str = "prism*2") -> LanguageModel:
    return open_model(folder(layers), "cpu")


def tokens_of(lm: LanguageModel, text: str) -> list[int]:
    return [int(token) for token in lm.tokenizer.encode([text])[0]]


def generated(lm: LanguageModel, prompt: str, tokens: int, sampling: Sampling, seed: int = 0) -> str:
    """What `prism generate` prints."""
    session = Session(lm, seed)
    session.read(prompt)
    return "".join(session.write(tokens, sampling)) + session.text.flush()


@dataclass(eq=False)
class Ask:
    """A request without HTTP, and what came of it."""

    prompt: str
    sampling: Sampling = Sampling(0.8)  # noqa: RUF009  (frozen)
    seed: int = 0
    tokens: int = 20
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    events: list[Any] = field(default_factory=list)

    def job(self, lm: LanguageModel, store: bool = False) -> Job:
        ends = frozenset([lm.tokenizer.end])
        given = self.sampling, self.seed, self.tokens, ends, self.stop, self.logprobs
        orders = [replace(Order(*given), seed=self.seed + i) for i in range(self.n)]
        return Job(Text().followed_by(tokens_of(lm, self.prompt)), orders, self.events.append, store)

    @property
    def pieces(self) -> list[Piece]:
        assert self.events and self.events[-1] is None, self.events[-1:]
        return self.events[:-1]

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)


def scheduler(lm: LanguageModel, **settings: Any) -> Scheduler:
    """A scheduler without a thread: call `turn`."""
    return Scheduler(lm, LmSettings(**settings), Metrics("tokens"))


def busy(one: Scheduler) -> bool:
    return bool(one._waiting or one._reading or one._jobs)


def run(one: Scheduler, asks: Sequence[Ask], join_after: int = 0) -> None:
    """Run requests to their end; each is sent `join_after` turns after the one before."""
    for ask in asks:
        one.submit(ask.job(one.lm))
        for _ in range(join_after):
            one.turn()
    while busy(one):
        one.turn()


@contextmanager
def serving(
    where: Path, api_key: str | None = None, max_body: int = 2**20, **settings: Any
) -> Iterator[tuple[httpx.Client, LmService]]:
    """A service of the model in a folder, on a free port: a client, and the service itself."""
    server = ServerSettings(port=0, api_key=api_key, max_body=max_body)
    service = open_service(where, LmSettings(device="cpu", **settings), Metrics("tokens"))
    with in_thread(lm_app(service, server), server) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, service
