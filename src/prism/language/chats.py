"""Read chats to learn from, and pairs of answers of which one is preferred, from jsonl files.

A line is an object in one of these forms:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}      as in OpenAI's API
    {"prompt": "…", "completion": "…"}                       a user's message and its answer
    {"prompt": "…", "chosen": "…", "rejected": "…"}          a user's message, a better and a worse answer

Prompts and answers are texts, or lists of messages. A line that is none of these is refused by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prism.language.chat import check_messages
from prism.language.text import json_rows

Messages = list[dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Chat:
    """The messages of a chat, and how many answers at its start are part of a prompt: they are not learned."""

    messages: Messages
    answered: int = 0


@dataclass(frozen=True)
class Preference:
    """Two chats with the same prompt."""

    chosen: Chat
    rejected: Chat


def chats(files: Sequence[Path]) -> Iterator[tuple[str, Chat]]:
    """All chats of jsonl files, each with the words that name it in errors."""
    return _read(files, chat_of)


def preferences(files: Sequence[Path]) -> Iterator[tuple[str, Preference]]:
    """All pairs of answers of jsonl files, each with the words that name it in errors."""
    return _read(files, preference_of)


def chat_of(row: Any) -> Chat:
    """The chat of a line; a ValueError says what is wrong with it."""
    if isinstance(row, dict) and "messages" in row:
        chat = Chat(check_messages(row["messages"]))
    elif isinstance(row, dict) and {"prompt", "completion"} <= row.keys():
        chat = _continued(_prompt(row["prompt"]), row["completion"], "completion")
    else:
        raise ValueError(f"expected messages, or prompt and completion, got {_keys(row)}")
    if not _answers(chat.messages):
        raise ValueError("there is no answer to learn: no message has the role assistant")
    return chat


def preference_of(row: Any) -> Preference:
    """The two chats of a line; a ValueError says what is wrong with it."""
    if not isinstance(row, dict) or not {"prompt", "chosen", "rejected"} <= row.keys():
        raise ValueError(f"expected prompt, chosen and rejected, got {_keys(row)}")
    prompt = _prompt(row["prompt"])
    found = Preference(*(_continued(prompt, row[name], name) for name in ("chosen", "rejected")))
    if found.chosen == found.rejected:
        raise ValueError("chosen and rejected are the same answer")
    return found


def _read(files: Sequence[Path], parse: Callable[[Any], T]) -> Iterator[tuple[str, T]]:
    return ((where, _parsed(row, where, parse)) for path in files for where, row in json_rows(path))


def _parsed(row: Any, where: str, parse: Callable[[Any], T]) -> T:
    try:
        return parse(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _prompt(value: Any) -> Messages:
    """A prompt as messages."""
    messages = check_messages([{"role": "user", "content": value}] if isinstance(value, str) else value)
    if messages[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an answer: its last message must not have the role assistant")
    return messages


def _continued(prompt: Messages, value: Any, name: str) -> Chat:
    """A prompt and its answer, which may be several messages, of which the last is the assistant's."""
    try:
        messages = check_messages([{"role": "assistant", "content": value}] if isinstance(value, str) else value)
    except ValueError as error:
        raise ValueError(f"{name} must be a text or a list of messages: {error}") from error
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"{name} must end with a message of the role assistant, got {messages[-1]['role']}")
    return Chat(prompt + messages, _answers(prompt))


def _answers(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _keys(row: Any) -> str:
    return (", ".join(map(str, row)) or "an empty object") if isinstance(row, dict) else type(row).__name__
