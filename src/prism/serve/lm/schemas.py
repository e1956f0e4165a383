"""Requests and answers of the language-model service, with OpenAI's names.

Fields of OpenAI's that this service has no use for are refused if they would change the text, and ignored if not. In a
request `true` and `"1"` are no numbers; 1.0 is an integer, as in JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from prism.serve.lm.states import NAME


def a_number(value: Any) -> Any:
    """Refuse what pydantic would turn into a number."""
    if isinstance(value, bool | str):
        raise ValueError(f"must be a number, got {value!r}")
    return value


Tokens = Annotated[list[Annotated[int, Field(ge=0), BeforeValidator(a_number)]], Field(min_length=1)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
StateName = Annotated[str, StringConstraints(pattern=NAME, max_length=64)]
SEEDS = 2**63
UNSUPPORTED = (
    "audio",
    "best_of",
    "echo",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "modalities",
    "presence_penalty",
    "response_format",
    "suffix",
    "tool_choice",
    "tools",
)
"""Fields that would change the text. Their neutral values are accepted."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
}


class StreamOptions(BaseModel):
    """What a stream tells beyond the text."""

    include_usage: StrictBool = Field(False, description="Send a last chunk with the usage.")


class Request(BaseModel):
    """What all requests for text share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(
        None, description="Name of the model, as in /v1/models; there is one, so it may be omitted."
    )
    max_tokens: int | None = Field(None, ge=0, description="Most tokens to write.")
    temperature: float = Field(1.0, ge=0, le=100, description="0: always the most likely token.")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the most likely tokens with this total probability.")
    top_k: int | None = Field(None, ge=1, description="Sample from the k most likely tokens.")
    n: int = Field(1, ge=1, description="How many texts to write. Text i has the seed `seed` + i.")
    seed: int | None = Field(
        None, ge=-SEEDS, lt=SEEDS, description="The same seed gives the same text. None: a random one."
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="Strings that end the text; it does not contain them."
    )
    stream: StrictBool = Field(False, description="Send the text while it is written, as server-sent events.")
    stream_options: StreamOptions | None = None
    state: str | None = Field(None, max_length=100, description="Id of a state to continue from; it stays as it is.")
    store_state: StrictBool = Field(False, description="Keep the state after the last token; the answer has its id.")

    @field_validator("temperature", "top_p", "n", "stream", "store_state", mode="before")
    @classmethod
    def _default(cls, value: Any, info: Any) -> Any:
        """OpenAI's clients may send null for a default."""
        return cls.model_fields[info.field_name].default if value is None else value

    _numbers = field_validator("max_tokens", "temperature", "top_p", "top_k", "n", "seed", mode="before")(a_number)

    def unsupported(self) -> str | None:
        """The first field that would change the text, and cannot."""
        given = self.model_extra or {}
        for name in UNSUPPORTED:
            value = given.get(name)
            if value is not None and value not in (False, 0, [], *NEUTRAL.get(name, ())):
                return name
        return None


def a_prompt(value: Any) -> Any:
    """Refuse what is no prompt in one sentence: pydantic would name the kinds that it might have been."""
    fault = None if isinstance(value, str) else _fault(value)
    if fault is not None:
        raise PydanticCustomError("prompt", "must be {wanted}, got {fault}", {"wanted": _PROMPT, "fault": fault})
    return value


_PROMPT = "a text, a list of tokens (integers of at least 0), or a list of several of one of these"


def _fault(value: Any) -> str | None:
    """What is wrong with a prompt that is no text."""
    if not isinstance(value, list):
        return "null" if value is None else type(value).__name__
    if not value:
        return "an empty list"
    if all(isinstance(one, str) for one in value):
        return None
    rows = value if all(isinstance(one, list) for one in value) else [value]
    if not all(rows):
        return "an empty list in a list"
    wrong = [one for row in rows for one in row if not _is_token(one)]
    return None if not wrong else f"{wrong[0]!r:.40} among the tokens"


def _is_token(one: Any) -> bool:
    whole = one.is_integer() if isinstance(one, float) else isinstance(one, int) and not isinstance(one, bool)
    return whole and bool(one >= 0)


class CompletionRequest(Request):
    """Continue a text."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)] = (
        Field("", description="The text to continue, or its tokens; or several, each with `n` texts.")
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Also the log-probabilities, with this many alternatives."
    )

    _prompt = field_validator("prompt", mode="before")(a_prompt)
    _alternatives = field_validator("logprobs", mode="before")(a_number)


class TextPart(BaseModel):
    """A part of a message. Only text can be read."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class ChatRequest(Request):
    """Answer a chat."""

    messages: list[ChatMessage] = Field(description="The chat so far; may be empty if there is a `state`.")
    max_completion_tokens: int | None = Field(None, ge=0, description="The same as max_tokens.")
    logprobs: StrictBool | None = Field(None, description="Also the log-probabilities.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="How many alternatives to each token.")

    _chat_numbers = field_validator("max_completion_tokens", "top_logprobs", mode="before")(a_number)


class CachedTokens(BaseModel):
    cached_tokens: int = Field(description="Tokens that were not read, because their state was kept.")


class Usage(BaseModel):
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """A text, or with `stream` a piece of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    state: str | None = Field(None, description="Id of the state after the last token, if it was asked for.")


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class Answer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: Answer
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    state: str | None = Field(None, description="Id of the state after the last token, if it was asked for.")


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(BaseModel):
    """A piece of the answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    state: str | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "prism"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class StateInput(BaseModel):
    """A text to read."""

    input: str
    name: StateName | None = Field(None, description="A name for people.")


class MoreInput(BaseModel):
    """A text to read after a state."""

    input: str


class ForkRequest(BaseModel):
    name: StateName | None = Field(None, description="A name for people.")


class SaveRequest(BaseModel):
    name: StateName = Field(description="Name of the file, without its ending.")
    overwrite: StrictBool = Field(False, description="Replace a file of this name.")


class LoadRequest(BaseModel):
    name: StateName = Field(description="Name of the file, without its ending.")


class StateInfo(BaseModel):
    """A state: what the model keeps of a text."""

    id: str
    object: Literal["state"] = "state"
    name: str | None
    bytes: int = Field(
        description="What it takes: a memory and at most one segment of tokens. All have one size, unless memories grow."
    )
    tokens: int = Field(description="Number of tokens that were read and written.")
    created: int
    parent: str | None = Field(description="Id of the state that it came from.")


class StateList(BaseModel):
    object: Literal["list"] = "list"
    data: list[StateInfo]
    bytes: int = Field(description="Size of all states.")
    saved: list[str] = Field(description="Names of the states in the store.")


class Deleted(BaseModel):
    id: str
    object: Literal["state.deleted", "state.saved.deleted"]
    deleted: Literal[True] = True


class ModelFacts(BaseModel):
    """Facts about the model, for the page."""

    name: str
    layers: int
    parameters: int
    state_bytes: int = Field(description="Size of the memory of one text; of one token, if it grows.")
    constant_state: bool = Field(description="Whether that size does not grow with the text.")
    kv_bytes_per_token: int = Field(
        description="What a float16 KV cache of a Transformer of this shape takes per token."
    )
    chat: bool = Field(description="Whether there is a chat template.")
    exact: bool = Field(description="Whether a text is the same whatever else is computed: tried at the start.")


class Stats(BaseModel):
    """What the service does now, and did in the last two minutes."""

    Model: ModelFacts
    Active: int
    Waiting: int
    States: int
    StateBytes: int
    Series: dict[str, list[float | None]]
