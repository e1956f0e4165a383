"""Chats as tokens: the same as transformers gives, which tokens are answers, and messages that cannot forge a turn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from prism.language.chat import (
    DEFAULT_TEMPLATE,
    ChatFormat,
    check_messages,
    load_chat_format,
    read_template,
    stop_tokens,
)
from prism.language.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from tests.tiny_lm import save_tokenizer

TEXT = "user assistant system Hello, what is the sum of 2 and 3? It is 5. Thanks!\n\nBye.\n" * 8
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = re.sub(r"\{%-? (end)?generation %\}", "", DEFAULT_TEMPLATE)


def formats() -> list[ChatFormat]:
    special = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    made = train_bpe([TEXT], 300)
    return [ChatFormat(tokenizer, DEFAULT_TEMPLATE, special) for tokenizer in (ByteTokenizer(), made)]


FORMATS = formats()


def roles(answers: int, system: bool) -> list[str]:
    return ["system"] * system + ["user", "assistant"] * answers


@st.composite
def chats(draw: st.DrawFn, special: bool = False) -> list[dict[str, Any]]:
    words = st.sampled_from(["Hello", " the sum", "2", "\n", "assistant", "é", "語", "<|", "end"])
    words = words | st.just("<|end|>") if special else words
    text = st.lists(words, min_size=1, max_size=5).map("".join)
    plain = text if special else text.filter(lambda text: "<|end|>" not in text)
    return [{"role": role, "content": draw(plain)} for role in roles(draw(st.integers(1, 3)), draw(st.booleans()))]


def theirs(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_str(tokenizer.definition)
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<|end|>", eos_token="<|end|>")


THEIRS = [theirs(each.tokenizer) for each in FORMATS]


@given(chats(), st.sampled_from([0, 1]))
def test_tokens_and_answers_are_those_of_transformers(chat: list[dict[str, Any]], which: int) -> None:
    expected = THEIRS[which].apply_chat_template(
        chat, chat_template=DEFAULT_TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
    )
    found = FORMATS[which].labelled(chat)
    assert found.tokens.tolist() == expected["input_ids"]
    assert found.answers.astype(int).tolist() == expected["assistant_masks"]
    prompt = THEIRS[which].apply_chat_template(
        chat[:-1], chat_template=DEFAULT_TEMPLATE, add_generation_prompt=True, return_dict=True
    )
    assert FORMATS[which].tokens(chat[:-1], add_generation_prompt=True).tolist() == prompt["input_ids"]


@given(chats(special=True), st.sampled_from(FORMATS), st.sampled_from([DEFAULT_TEMPLATE, UNMARKED]))
def test_a_message_cannot_forge_a_turn(chat: list[dict[str, Any]], base: ChatFormat, template: str) -> None:
    made = ChatFormat(base.tokenizer, template, base.special)
    found, end = made.labelled(chat), made.tokenizer.end
    assert (found.tokens == end).sum() == len(chat) + 1  # one opens the chat, one ends every message
    assert made.tokenizer.decode(found.tokens) == made.render(chat)
    answers = [message["content"].strip() for message in chat if message["role"] == "assistant"]
    assert made.tokenizer.decode(found.tokens[found.answers]) == "".join(answer + "<|end|>" for answer in answers)


@given(chats(), st.sampled_from(FORMATS))
def test_answers_without_marks_are_the_same(chat: list[dict[str, Any]], base: ChatFormat) -> None:
    text, spans = base.render(chat), ChatFormat(base.tokenizer, UNMARKED, base.special).answers(chat)
    assert spans == base.answers(chat)
    answers = [message["content"].strip() + "<|end|>" for message in chat if message["role"] == "assistant"]
    assert [text[start:stop] for start, stop in spans] == answers


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    last_only = "{% for message in messages %}{% if loop.last %}{{ message.content }}{% endif %}{% endfor %}"
    chat = [{"role": role, "content": role} for role in roles(2, False)]
    with pytest.raises(ValueError, match=r"writes message 2 differently .* mark the answers .*generation"):
        ChatFormat(ByteTokenizer(), last_only).answers(chat)


def test_the_template_of_a_folder_is_found_where_transformers_puts_it(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match=r"has no chat template .* `prism train sft`"):
        load_chat_format(tmp_path)
    assert load_chat_format(tmp_path, default=True).template == DEFAULT_TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    assert load_chat_format(tmp_path).template == CHATML and load_chat_format(tmp_path, default=True).template == CHATML
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value in (CHATML, [{"name": "default", "template": CHATML}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert load_chat_format(tmp_path).template == CHATML
    other = tmp_path / "mine.jinja"
    other.write_text(UNMARKED)
    assert load_chat_format(tmp_path, other).template == UNMARKED


def test_templates_run_in_a_sandbox_and_fail_in_one_sentence(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    for code in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('only system') }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(ValueError, match="the chat template cannot write this chat: "):
            ChatFormat(ByteTokenizer(), code).render(chat)
    (tmp_path / "broken.jinja").write_text("\n{% for %}")
    with pytest.raises(ValueError, match=r"broken.jinja, line 2 is not a chat template in jinja2"):
        read_template(tmp_path / "broken.jinja")
    with pytest.raises(FileNotFoundError, match="there is no chat template"):
        read_template(tmp_path / "none.jinja")


def test_stop_tokens_are_the_end_and_those_of_the_generation_config(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    assert stop_tokens(tmp_path, tokenizer) == (256,)
    for named, expected in ((3, (256, 3)), ([256, 7], (256, 7))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert stop_tokens(tmp_path, tokenizer) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages must be a list of at least one message, got 'Hello'"),
        ([], "messages must be a list of at least one message"),
        ([{"content": "x"}], "message 1 must be an object with role and content"),
        ([{"role": "user", "content": "x"}, {"role": "asistant", "content": "y"}], r"message 2 .* 'assistant'\?"),
        ([{"role": "user", "content": None}], "the content of message 1 must be text, got None"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "has a part that is not text"),
        ([{"role": "user", "content": "\ud800"}], "cannot be encoded as UTF-8"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_messages(messages)


def test_parts_of_a_message_are_joined_and_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert [message["content"] for message in check_messages(calls)] == ["ab", ""]
