"""OpenAI's routes: /v1/models, /v1/completions and /v1/chat/completions, whole or as server-sent events."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from prism.serve.errors import ApiError, error_body
from prism.serve.lm import schemas
from prism.serve.lm.schemas import ChatRequest, CompletionRequest
from prism.serve.lm.service import Answering, Gone, LmService
from prism.serve.lm.writer import Finish, Piece, TokenProbability

log = logging.getLogger("prism.serve")
DEFAULT_TOKENS = 16
"""Most tokens of a completion, if it is not said; a chat then may be as long as the service allows."""
CLOSED = 499
"""The status of a request whose client has left; no one sees it but the log."""
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def openai_routes(service: LmService) -> APIRouter:
    """The routes of a service."""
    router = APIRouter(prefix="/v1", tags=["openai"])

    @router.get("/models")
    def models() -> schemas.ModelList:
        """The one model of this service."""
        return schemas.ModelList(data=[card(service)])

    @router.get("/models/{model:path}")
    def model(model: str) -> schemas.ModelCard:
        """The model, if this is its name."""
        if model != service.lm.name:
            raise ApiError(404, f"there is no model {model!r}, but {service.lm.name!r}", "model", "model_not_found")
        return card(service)

    @router.post("/completions", response_model=schemas.Completion, responses=EVENTS)
    async def completions(body: CompletionRequest, request: HttpRequest) -> Any:
        """Continue a text."""
        service.check(body)
        texts = await service.completion_texts(body)
        if body.store_state and len(texts) > 1:
            raise ApiError(400, f"store_state needs one prompt, got {len(texts)}", "prompt")
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        orders = service.order(body, min(most, service.settings.max_tokens), body.logprobs, chat=False)
        return await _reply(_Completion(service, body, service.answer(texts, orders, body.store_state)), request)

    @router.post("/chat/completions", response_model=schemas.ChatCompletion, responses=EVENTS)
    async def chat(body: ChatRequest, request: HttpRequest) -> Any:
        """Answer a chat, with the model's chat template."""
        if body.max_completion_tokens is not None:
            body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
        service.check(body)
        text = await service.chat_text(body)
        most = service.settings.max_tokens if body.max_tokens is None else body.max_tokens
        orders = service.order(body, most, (body.top_logprobs or 0) if body.logprobs else None, chat=True)
        return await _reply(_Chat(service, body, service.answer([text], orders, body.store_state)), request)

    return router


def card(service: LmService) -> schemas.ModelCard:
    return schemas.ModelCard(id=service.lm.name, created=service.created)


async def _reply(reply: _Reply, request: HttpRequest) -> Any:
    if reply.body.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    try:
        return await reply.whole(request)
    except Gone:
        return Response(status_code=CLOSED)


class _Reply:
    """The answer to one request, whole or as events."""

    kind = ""

    def __init__(self, service: LmService, body: schemas.Request, answering: Answering) -> None:
        self.service, self.body, self.answering = service, body, answering
        self.head: dict[str, Any] = {
            "id": f"{self.kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.lm.name,
        }
        self.choices = len(answering.jobs) * len(answering.jobs[0].orders)
        self.offsets = [0] * self.choices
        """Length of the text so far, for the places of tokens in it."""

    def first(self) -> list[BaseModel]:
        """What is sent before any text."""
        return []

    def chunk(self, piece: Piece | None, **more: Any) -> BaseModel:
        """One event; with no piece, one without text."""
        raise NotImplementedError

    def all(self, texts: list[str], tokens: list[list[TokenProbability]], finish: list[Any], **more: Any) -> BaseModel:
        """The whole answer."""
        raise NotImplementedError

    def store(self) -> dict[str, str]:
        """Keep the state after the last token, if that was asked for."""
        if not self.body.store_state:
            return {}
        return {"state": self.service.states.add(self.answering.jobs[0].text, parent=self.body.state).id}

    async def whole(self, request: HttpRequest) -> BaseModel:
        texts = [""] * self.choices
        finish: list[Finish | None] = [None] * self.choices
        tokens: list[list[TokenProbability]] = [[] for _ in texts]
        async for piece in self.answering.pieces(request):
            texts[piece.choice] += piece.text
            tokens[piece.choice] += piece.tokens
            finish[piece.choice] = piece.finish
        return self.all(texts, tokens, finish, usage=self.answering.usage(), **self.store())

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: the pieces, the usage if asked for, and [DONE]. The state comes with the last piece."""
        last: Piece | None = None
        try:
            for chunk in self.first():
                yield _event(chunk)
            async for piece in self.answering.pieces():
                if self.body.store_state and piece.finish:
                    last = piece
                else:
                    yield _event(self.chunk(piece))
            if last is not None:
                yield _event(self.chunk(last, **self.store()))
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield _event(self.chunk(None, usage=self.answering.usage()))
        except Exception as error:  # the status is sent already: the error is an event
            status = error.status if isinstance(error, ApiError) else 500
            if status == 500:
                log.error("a stream failed", exc_info=error)
            yield f"data: {json.dumps(error_body(status, str(error)))}\n\n"
            return
        yield "data: [DONE]\n\n"


class _Completion(_Reply):
    kind = "cmpl"

    def chunk(self, piece: Piece | None, **more: Any) -> BaseModel:
        if piece is None:
            return schemas.Completion(**self.head, choices=[], **more)
        return schemas.Completion(**self.head, choices=[self._choice(piece)], **more)

    def all(self, texts: list[str], tokens: list[list[TokenProbability]], finish: list[Any], **more: Any) -> BaseModel:
        pieces = [
            Piece(i, text, tuple(own), end)
            for i, (text, own, end) in enumerate(zip(texts, tokens, finish, strict=True))
        ]
        return schemas.Completion(**self.head, choices=[self._choice(piece) for piece in pieces], **more)

    def _choice(self, piece: Piece) -> schemas.CompletionChoice:
        asked = isinstance(self.body, CompletionRequest) and self.body.logprobs is not None
        logprobs = self._logprobs(piece) if asked else None
        self.offsets[piece.choice] += len(piece.text)
        return schemas.CompletionChoice(
            index=piece.choice, text=piece.text, logprobs=logprobs, finish_reason=piece.finish
        )

    def _logprobs(self, piece: Piece) -> schemas.CompletionLogprobs:
        name = _Names(self.service.lm.tokenizer.decode)
        names = [name(token.token) for token in piece.tokens]
        offsets = [self.offsets[piece.choice] + sum(map(len, names[:i])) for i in range(len(names))]
        return schemas.CompletionLogprobs(
            tokens=names,
            token_logprobs=[token.logprob for token in piece.tokens],
            top_logprobs=[{name(other): logprob for other, logprob in token.top} for token in piece.tokens],
            text_offset=offsets,
        )


class _Chat(_Reply):
    kind = "chatcmpl"

    def first(self) -> list[BaseModel]:
        delta = schemas.Delta(role="assistant", content="")
        choices = [schemas.ChatChunkChoice(index=i, delta=delta) for i in range(self.choices)]
        return [schemas.ChatChunk(**self.head, choices=[choice]) for choice in choices]

    def chunk(self, piece: Piece | None, **more: Any) -> BaseModel:
        if piece is None:
            return schemas.ChatChunk(**self.head, choices=[], **more)
        choice = schemas.ChatChunkChoice(
            index=piece.choice,
            delta=schemas.Delta(content=piece.text),
            logprobs=self._logprobs(piece.tokens, self.offsets[piece.choice] == 0),
            finish_reason=piece.finish,
        )
        self.offsets[piece.choice] += len(piece.text)
        return schemas.ChatChunk(**self.head, choices=[choice], **more)

    def all(self, texts: list[str], tokens: list[list[TokenProbability]], finish: list[Any], **more: Any) -> BaseModel:
        choices = [
            schemas.ChatChoice(
                index=i, message=schemas.Answer(content=text), logprobs=self._logprobs(own), finish_reason=end
            )
            for i, (text, own, end) in enumerate(zip(texts, tokens, finish, strict=True))
        ]
        return schemas.ChatCompletion(**self.head, choices=choices, **more)

    def _logprobs(self, tokens: Sequence[TokenProbability], begins: bool = True) -> schemas.ChatLogprobs | None:
        """The probabilities of tokens.

        Args:
            begins: whether the answer begins with these tokens.
        """
        if not (isinstance(self.body, ChatRequest) and self.body.logprobs):
            return None
        tokenizer = self.service.lm.tokenizer
        name = _Names(tokenizer.decode)

        def entry(token: int, logprob: float, first: bool) -> dict[str, Any]:
            return {"token": name(token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token, first))}

        content = [
            schemas.ChatTokenLogprob(
                **entry(token.token, token.logprob, first),
                top_logprobs=[schemas.TokenLogprob(**entry(*other, first)) for other in token.top],
            )
            for token, first in zip(tokens, chain([begins], repeat(False)))  # noqa: B905  (the second has no end)
        ]
        return schemas.ChatLogprobs(content=content)


@dataclass(frozen=True)
class _Names:
    """The text of a single token."""

    decode: Callable[[list[int]], str]

    def __call__(self, token: int) -> str:
        return self.decode([token])


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json()}\n\n"
