"""The language-model service: a model, its scheduler, its states and its chat template, between HTTP and the computation."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from prism.files import check_target, read_json
from prism.language.chat import TEMPLATE, ChatFormat, check_messages, load_chat_format, stop_tokens
from prism.language.generate import LanguageModel, Sampling, open_model
from prism.language.tokenizer import check_unicode
from prism.serve.errors import ApiError
from prism.serve.lm.scheduler import Full, Job, Scheduler
from prism.serve.lm.schemas import ChatRequest, CompletionRequest, ModelFacts, Request, Stats, Usage
from prism.serve.lm.settings import LmSettings
from prism.serve.lm.states import States
from prism.serve.lm.text import Text
from prism.serve.lm.writer import Order, Piece
from prism.serve.metrics import Metrics

COOLEST = 1e-3
"""Smallest temperature but 0: logits divided by less are no longer finite."""
NO_TEMPLATE = (
    "this model has no chat template: start the service with --chat-template FILE, or fine-tune the model on chats with "
    "`prism train sft`; /v1/completions needs none"
)


class Gone(Exception):
    """The client has closed its connection."""


class LmService:
    """A language model that answers requests.

    Args:
        chat: how chats become tokens; None: the model has no template.
        chat_ends: tokens that end an answer of a chat.
    """

    def __init__(
        self,
        lm: LanguageModel,
        settings: LmSettings,
        metrics: Metrics,
        chat: ChatFormat | None = None,
        chat_ends: Sequence[int] = (),
    ) -> None:
        settings.check()
        if not lm.own:
            raise ValueError(f"{lm.name} is not a model of this library: `prism serve lm` needs one")
        self.lm, self.settings, self.metrics, self.chat = lm, settings, metrics, chat
        self._ends = {False: frozenset([lm.tokenizer.end]), True: frozenset([lm.tokenizer.end, *chat_ends])}
        self.scheduler = Scheduler(lm, settings, metrics)
        self.states = States(lm, settings.max_states, settings.state_bytes, settings.store)
        self.created = int(time.time())
        metrics.gauge("states", "States that clients keep.", lambda: len(self.states))
        metrics.gauge("state_bytes", "Bytes of states that clients keep.", lambda: self.states.nbytes)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Run the scheduler while the application runs."""
        self.scheduler.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.scheduler.stop)

    def not_ready(self) -> str | None:
        return None if self.scheduler.alive else "the scheduler does not run"

    # From requests to jobs

    def check(self, request: Request) -> None:
        """Refuse what cannot be served, before anything is computed."""
        if request.model is not None and request.model != self.lm.name:
            raise ApiError(
                404, f"there is no model {request.model!r}, but {self.lm.name!r}", "model", "model_not_found"
            )
        if (name := request.unsupported()) is not None:
            raise ApiError(400, f"{name} is not supported: omit it", name, "unsupported")
        self._check_count(request.n)
        if 0 < request.temperature < COOLEST:
            raise ApiError(
                400, f"temperature must be 0 or at least {COOLEST}, got {request.temperature}", "temperature"
            )
        if (request.max_tokens or 0) > self.settings.max_tokens:
            raise ApiError(
                400,
                f"max_tokens must be at most {self.settings.max_tokens} here, got {request.max_tokens}",
                "max_tokens",
            )
        if request.store_state:
            if request.n > 1:
                raise ApiError(400, f"store_state needs n = 1, got {request.n}: store one and fork it", "n")
            self.states.check_room()

    async def completion_texts(self, request: CompletionRequest) -> list[Text]:
        """The texts to continue, one for each prompt."""
        prompt = request.prompt
        if isinstance(prompt, str):
            return [self._after(request, await self.encode(prompt, "prompt"))]
        if isinstance(prompt[0], int):
            return [self._after(request, self._known(prompt))]
        parts: Any = prompt
        tokens = [await self.encode(x, "prompt") if isinstance(x, str) else self._known(x) for x in parts]
        return [self._after(request, part) for part in tokens]

    async def chat_text(self, request: ChatRequest) -> Text:
        """The text of a chat, up to where the answer starts."""
        if self.chat is None:
            raise ApiError(400, NO_TEMPLATE, "messages", "no_chat_template")
        if not request.messages:
            if request.state is None:
                raise ApiError(400, "messages must have at least one message", "messages")
            return self._after(request, [])
        try:
            messages = check_messages([message.model_dump(exclude_none=True) for message in request.messages])
            found = await run_in_threadpool(self.chat.tokens, messages, True)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        return self._after(request, self._within_limit(found.tolist(), "messages"), chat=True)

    async def encode(self, text: str, param: str) -> list[int]:
        """The tokens of a text."""
        try:
            check_unicode(text, param)
        except ValueError as error:
            raise ApiError(400, str(error), param) from error
        found = (await run_in_threadpool(self.lm.tokenizer.encode, [text]))[0]
        return self._within_limit(found.astype("int64").tolist(), param)

    def _known(self, tokens: Any) -> list[int]:
        if not all(token < self.lm.tokenizer.size for token in tokens):
            raise ApiError(400, f"prompt has a token that is none: there are {self.lm.tokenizer.size}", "prompt")
        return self._within_limit(list(tokens), "prompt")

    def _within_limit(self, tokens: list[int], param: str) -> list[int]:
        most = self.settings.max_prompt
        if len(tokens) > most:
            what = f"{param} has {len(tokens)} tokens, more than the {most} that one request may bring"
            raise ApiError(400, f"{what}: send the first part to /v1/states", param, "context_length_exceeded")
        return tokens

    def _after(self, request: Request, tokens: list[int], chat: bool = False) -> Text:
        """Tokens after the request's state, if it has one. A text without any token starts with the end token."""
        before = Text(documents=not chat) if request.state is None else self.states.get(request.state, "state").text
        text = before.followed_by(tokens)
        return text if len(text) else text.followed_by([self.lm.tokenizer.end])

    def order(self, request: Request, most: int, logprobs: int | None, chat: bool) -> list[Order]:
        """How the `n` texts of a request are written."""
        greedy = request.temperature == 0
        sampling = Sampling(
            request.temperature,
            None if greedy else request.top_k,
            None if greedy or request.top_p == 1 else request.top_p,
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(request.n)]
        return [Order(sampling, each, most, self._ends[chat], stop, logprobs) for each in seeds]

    def answer(self, texts: Sequence[Text], orders: Sequence[Order], store: bool = False) -> Answering:
        """Start to read these texts and to write after each of them."""
        self._check_count(len(texts) * len(orders))
        return Answering(self.scheduler, texts, orders, store)

    def _check_count(self, texts: int) -> None:
        if texts > self.settings.rows:
            raise ApiError(400, f"one request may ask for at most {self.settings.rows} texts, got {texts}", "n")

    async def read(self, text: Text) -> Text:
        """Read a text, so that it can be kept."""
        if not text.tail:
            return text
        answering = self.answer([text], [])
        async for _ in answering.pieces():
            pass
        return answering.jobs[0].text

    def facts(self) -> ModelFacts:
        model, config = self.lm.model, self.lm.model.config
        return ModelFacts(
            name=self.lm.name,
            layers=config.num_hidden_layers,
            parameters=sum(weight.numel() for weight in model.parameters()),
            state_bytes=self.states.memory,
            constant_state=config.constant_state,
            kv_bytes_per_token=2 * 2 * config.num_hidden_layers * config.hidden_size,
            chat=self.chat is not None,
            exact=self.scheduler.exact,
        )

    def stats(self) -> Stats:
        return Stats(
            Model=self.facts(),
            Active=self.scheduler.active,
            Waiting=self.scheduler.waiting,
            States=len(self.states),
            StateBytes=self.states.nbytes,
            Series=self.metrics.series(),
        )


class Answering:
    """The jobs of one request, and their pieces as they come. Made and read in an event loop."""

    def __init__(self, scheduler: Scheduler, texts: Sequence[Text], orders: Sequence[Order], store: bool) -> None:
        self._scheduler = scheduler
        self._events: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.jobs = [Job(text, orders, self._send, store, i * len(orders)) for i, text in enumerate(texts)]
        try:
            for job in self.jobs:
                scheduler.submit(job)
        except Full as error:
            self.cancel()
            raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"}) from error

    def _send(self, event: Piece | Exception | None) -> None:
        """Called by the scheduler's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the event loop has ended: no one waits any more
            self.cancel()

    def cancel(self) -> None:
        for job in self.jobs:
            self._scheduler.cancel(job)

    async def pieces(self, request: HttpRequest | None = None) -> AsyncIterator[Piece]:
        """All pieces until the jobs are done. If this ends early, or `request` is closed by its client, the jobs end."""
        watch = None if request is None else asyncio.create_task(self._watch(request))
        open_jobs = len(self.jobs)
        try:
            while open_jobs:
                event = await self._events.get()
                if isinstance(event, Full):
                    raise ApiError(503, str(event), code="stopping", headers={"Retry-After": "2"})
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    open_jobs -= 1
                else:
                    yield event
        finally:
            self.cancel()
            if watch is not None:
                watch.cancel()

    async def _watch(self, request: HttpRequest) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(Gone())

    def usage(self) -> Usage:
        prompt = sum(job.prompt_tokens for job in self.jobs)
        completion = sum(job.completion_tokens for job in self.jobs)
        cached = sum(job.cached_tokens for job in self.jobs)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details={"cached_tokens": cached},  # type: ignore[arg-type]  # pydantic makes the object
        )


def open_service(folder: Path, settings: LmSettings, metrics: Metrics, name: str | None = None) -> LmService:
    """Open the model, the chat template and the store that a service needs.

    Args:
        folder: a model folder.
        name: what the model is called; None: as its folder.
    """
    settings.check()
    if settings.store is not None:
        check_target(settings.store, folder=True, name="store")
    lm = open_model(folder, settings.device)
    config = folder / "tokenizer_config.json"
    has_template = (folder / TEMPLATE).is_file() or (config.is_file() and read_json(config).get("chat_template"))
    chat = load_chat_format(folder, settings.chat_template) if settings.chat_template or has_template else None
    lm = lm if name is None else replace(lm, name=name)
    return LmService(lm, settings, metrics, chat, stop_tokens(folder, lm.tokenizer))
