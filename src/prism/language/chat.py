"""Turn the messages of a chat into text and tokens, with the template that comes with a tokenizer.

A template is jinja2 code, run in transformers' sandbox by the same function as `tokenizer.apply_chat_template`: the tokens
are those of transformers, in training and in use.

Design choices
- Special tokens are marks of the template alone. One that is written out in a message, such as `<|end|>`, is encoded as plain
  characters: no one can end a turn or open another by writing its mark. (transformers would take it for the mark.)
- The answers in a text are what the template puts between `{% generation %}` and `{% endgeneration %}`. For a template
  without these marks, an answer is what the text has more with it than without it.
- The default template needs no tokens that a tokenizer of this library lacks. The end token opens the chat and ends every
  message, so it does not end the document: a `Reader` of chats has `documents=False`, and resets no memories at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prism.files import read_json
from prism.language.tokenizer import Tokenizer, check_unicode, load_tokenizer
from prism.messages import did_you_mean
from prism.models.compat import compile_chat_template

Message = Mapping[str, Any]
"""`role` and `content`, as in OpenAI's API, and further entries that a template may use, such as `name`."""
TEMPLATE = "chat_template.jinja"
"""The file of a model folder that holds the template."""
DEFAULT_TEMPLATE = """\
{{- bos_token or eos_token }}
{%- for message in messages %}
    {{- message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant\\n' }}
{%- endif %}
"""
"""The template of models that have none: `<|end|>user\\nHello.<|end|>assistant\\nHello!<|end|>`."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTokens:
    """A chat as tokens."""

    tokens: np.ndarray
    """int64 `[T]`."""
    answers: np.ndarray
    """bool `[T]`: the tokens that the assistant wrote, its ends of turns included."""
    answer_bytes: int
    """Size of the text of the answers in UTF-8, without special tokens."""


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer and a template for chats.

    Args:
        special: special tokens that the template may use, by name, such as `eos_token`.
        name: what the template is called in errors.
    """

    tokenizer: Tokenizer
    template: str
    special: dict[str, str] = field(default_factory=dict)
    name: str = "the chat template"

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of a chat; with `add_generation_prompt`, up to where an answer starts."""
        return self._render(messages, add_generation_prompt)[0]

    def answers(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Where the answers are in the text that `render` returns: first character, and the one after the last."""
        if _MARKED.search(self.template):
            return self._render(messages, False)[1]
        text = self.render(messages)
        spans = []
        for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            before = self.render(messages[:i], add_generation_prompt=True)
            with_answer = self.render(messages[: i + 1])
            if not (with_answer.startswith(before) and text.startswith(with_answer)):
                raise ValueError(
                    f"{self.name} writes message {i + 1} differently when others follow it: mark the answers in the "
                    "template with {% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(with_answer)))
        return spans

    def tokens(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> np.ndarray:
        """The tokens of a chat, int64 `[T]`; with `add_generation_prompt`, up to where an answer starts."""
        mark = self._mark(messages)
        text = self.render(
            messages if mark is None else _broken(messages, self._special_tokens, mark), add_generation_prompt
        )
        return self._encode(text, mark)[0]

    def labelled(self, messages: Sequence[Message], skip: int = 0) -> ChatTokens:
        """The tokens of a chat, and which of them are answers.

        Args:
            skip: number of answers at the start that do not count.
        """
        mark = self._mark(messages)
        shown = messages if mark is None else _broken(messages, self._special_tokens, mark)
        text, spans = self.render(shown), self.answers(shown)[skip:]
        tokens, offsets = self._encode(text, mark)
        first, stop = offsets[:, 0], offsets[:, 1]
        answers = np.zeros(len(tokens), dtype=bool)
        for start, end in spans:
            answers |= (stop > start) & (first < end)
        return ChatTokens(tokens, answers, sum(self._size(text[start:end]) for start, end in spans))

    @cached_property
    def _special_tokens(self) -> re.Pattern[str] | None:
        names = sorted(self.tokenizer.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def _size(self, text: str) -> int:
        return len((text if self._special_tokens is None else self._special_tokens.sub("", text)).encode())

    def end_of_answer(self) -> int | None:
        """The special token that the template puts after an answer; None if it puts none there."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        found = self.labelled(chat)
        special = {int(self.tokenizer.encode_marked(name)[0][0]) for name in self.tokenizer.special_tokens}
        return next((int(token) for token in found.tokens[found.answers] if int(token) in special), None)

    def _mark(self, messages: Sequence[Message]) -> str | None:
        """A character that no message has, to break up the special tokens that messages have; None if they have none."""
        texts = list(_strings(messages))
        if self._special_tokens is None or not any(self._special_tokens.search(text) for text in texts):
            return None
        return next(chr(code) for code in range(0xE000, 0xF900) if not any(chr(code) in text for text in texts))

    def _render(self, messages: Sequence[Message], prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans that the template marks."""
        from transformers.utils import chat_template_utils

        run: Any = (
            chat_template_utils.render_jinja_template
        )  # its annotations are not those of what it takes and returns
        try:
            texts, spans = run(
                [list(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=_MARKED.search(self.template) is not None,
                add_generation_prompt=prompt,
                **self.special,
            )
        except ImportError:
            raise
        except Exception as error:  # the template is code, and may raise anything
            raise ValueError(f"{self.name} cannot write this chat: {error or type(error).__name__}") from error
        return texts[0], [(start, stop) for start, stop in spans[0]] if spans else []

    def _encode(self, text: str, mark: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 `[T]` and where they are in the text, int64 `[T, 2]`.

        Args:
            mark: the character that breaks up special tokens; it is not encoded. Pieces between the others are then encoded
                one by one, as the tokenizer itself does for special tokens.
        """
        if mark is None:
            return self.tokenizer.encode_marked(text)
        tokens, offsets = [], []
        assert self._special_tokens is not None
        for piece in re.finditer(
            f"(?:{self._special_tokens.pattern})|(?s:.+?)(?={self._special_tokens.pattern}|$)", text
        ):
            kept = np.array([i for i in range(*piece.span()) if text[i] != mark] + [piece.end()])
            plain = piece.group().replace(mark, "")
            found, places = self.tokenizer.encode_marked(plain, plain=mark in piece.group())
            tokens.append(found)
            offsets.append(kept[places])
        return np.concatenate(tokens), np.concatenate(offsets)


def load_chat_format(folder: Path, template: Path | None = None, default: bool = False) -> ChatFormat:
    """The chat format of a model folder.

    Args:
        template: file with another template than the folder's.
        default: use `DEFAULT_TEMPLATE` if there is none; otherwise that is an error.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    special = {name: _content(value) for name, value in config.items() if name.endswith("_token") and _content(value)}
    tokenizer = load_tokenizer(folder / "tokenizer.json", special.get("eos_token"))
    special.setdefault("eos_token", tokenizer.end_token)
    if template is not None:
        return ChatFormat(tokenizer, read_template(template), special, f"the chat template {template}")
    found = _folder_template(folder, config)
    if found is None and not default:
        raise ValueError(
            f"the model in {folder} has no chat template (no {TEMPLATE}, no chat_template in tokenizer_config.json): "
            "fine-tune it on chats with `prism train sft`, or give a template"
        )
    name = "the default chat template" if found is None else f"the chat template of {folder}"
    return ChatFormat(tokenizer, DEFAULT_TEMPLATE if found is None else found, special, name)


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer: the end token, and those that a generation_config.json names."""
    path = folder / "generation_config.json"
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    return tuple(dict.fromkeys([tokenizer.end, *(named if isinstance(named, list) else [named] if named else [])]))


def read_template(path: Path) -> str:
    """A template from a file, which is not run here. Refused if it is not valid jinja2."""
    from jinja2 import TemplateSyntaxError

    if not path.is_file():
        raise FileNotFoundError(f"there is no chat template {path}")
    try:
        text = path.read_text(encoding="utf-8")
        compile_chat_template(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except TemplateSyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno} is not a chat template in jinja2: {error.message}") from error
    return text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat with their contents as plain text; a ValueError says which message is wrong."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {_shown(messages)}")
    return [_check_message(message, f"message {i}") for i, message in enumerate(messages, 1)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"{where} must be an object with role and content, got {_shown(message)}")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise ValueError(f"the role of {where} must be one of {', '.join(ROLES)}, got {role!r}{hint}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError(f"the content of {where} has a part that is not text: only text can be read")
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of {where} must be text, got {_shown(content)}")
    check_unicode(content, f"the content of {where}")
    return {**message, "content": content}


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template of a model folder, or None. Of several the one called default is taken, as transformers does."""
    if (folder / TEMPLATE).is_file():
        return read_template(folder / TEMPLATE)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _content(token: Any) -> Any:
    """The text of a token in a tokenizer_config.json, which may be an object; None if it has none."""
    return token.get("content") if isinstance(token, dict) else token


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)


def _broken(value: Any, special: re.Pattern[str] | None, mark: str) -> Any:
    """Nested lists and dicts in whose strings every special token has `mark` after its first character."""
    assert special is not None
    if isinstance(value, str):
        return special.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
    if isinstance(value, Mapping):
        return {name: _broken(part, special, mark) for name, part in value.items()}
    return [_broken(part, special, mark) for part in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    """A value for an error message, short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
