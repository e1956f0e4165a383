"""Chats as rows: nothing is lost in packing, only answers are targets, long chats are counted, bad lines are named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.language.chat import DEFAULT_TEMPLATE, ChatFormat
from prism.language.chat_rows import (
    ANSWER,
    START,
    TOKEN,
    ChatRecipe,
    ChatRows,
    Packer,
    batch_of,
    chat_starts,
    prepare_chats,
)
from prism.language.chats import chat_of, chats, preference_of
from prism.language.tokenizer import ByteTokenizer
from prism.models import PrismConfig, PrismForCausalLM
from prism.models.cross_entropy import IGNORED

FORMAT = ChatFormat(ByteTokenizer(), DEFAULT_TEMPLATE, {"bos_token": "<|end|>", "eos_token": "<|end|>"})
OVERHEAD = len("_user\n_assistant\n_")
"""Tokens of a chat of one question besides its texts."""


def line(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 5))
def test_packing_keeps_every_chat_once_and_whole(lengths: list[int], open_rows: int) -> None:
    packer, rows = Packer(20, open_rows), []
    for i, length in enumerate(lengths):
        row = packer.add(np.full(length, i))
        rows += [] if row is None else [row]
    rows += packer.rest()
    assert all(0 < sum(map(len, row)) <= 20 for row in rows)
    found = sorted((int(chat[0]), len(chat)) for row in rows for chat in row)
    assert found == list(enumerate(lengths))
    if open_rows * 20 > sum(lengths):  # nothing was closed early: no two rows fit into one
        sizes = sorted(sum(map(len, row)) for row in rows)
        assert len(sizes) < 2 or sizes[0] + sizes[1] > 20


def test_rows_hold_the_chats_and_only_answers_are_targets(tmp_path: Path) -> None:
    made = [line(f"{i}?", "yes" * (i % 4 + 1)) for i in range(60)]
    recipe = ChatRecipe((write(tmp_path, made),), context=64, validation=0.1)
    corpus = prepare_chats(recipe, FORMAT, True, cache=tmp_path / "cache")
    rows = ChatRows(corpus.stream("train"), 64, packing=True)
    batch = rows.batch(np.arange(len(rows)))
    assert batch.inputs.shape == (len(rows), 64) and batch.reset is not None
    texts, answers = [], []
    for tokens, targets, starts in zip(batch.inputs, batch.targets, batch.reset, strict=True):
        cuts = [*starts.nonzero().flatten().tolist(), 64]
        texts += [FORMAT.tokenizer.decode(tokens[a:b]) for a, b in pairwise(cuts)]
        answers.append(FORMAT.tokenizer.decode(targets[targets != IGNORED]))
        known = targets[:-1] != IGNORED
        assert torch.equal(targets[:-1][known], tokens[1:][known]) and targets[-1] == IGNORED
    expected = [FORMAT.render(row["messages"]) for i, row in enumerate(made, 1) if i % 10]
    held = [FORMAT.render(row["messages"]) for i, row in enumerate(made, 1) if i % 10 == 0]
    ends = "<|end|>" * 64
    assert sorted(text.rstrip("<|end>") for text in texts) == sorted(text.rstrip("<|end>") for text in expected)
    assert all(
        text.startswith("<|end|>user") and ends.startswith(text.partition("yes")[2].lstrip("yes")) for text in texts
    )
    assert "".join(sorted("".join(answers).split("<|end|>"))) == "".join(
        sorted(row["messages"][1]["content"] for i, row in enumerate(made, 1) if i % 10)
    )
    assert rows.predicted(np.arange(len(rows))) == int(batch.predicted) == corpus.facts["train"].answer_tokens
    assert 0.85 < corpus.filled <= 1
    alone = ChatRows(prepare_chats(recipe, FORMAT, False, cache=tmp_path / "cache").stream("validation"), 64, False)
    assert [FORMAT.tokenizer.decode(row & TOKEN) for row in alone.read(np.arange(len(alone)))] == held
    assert alone.batch(np.arange(2)).reset is None


def test_long_chats_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    fitting, cut = line("?", "a" * (40 - OVERHEAD - 1)), line("?", "b" * (41 - OVERHEAD - 1))
    hopeless = line("c" * 60, "d")
    source = write(tmp_path, [fitting, cut, hopeless, fitting, fitting, fitting])
    found = {}
    for policy in ("cut", "drop"):
        recipe = ChatRecipe((source,), context=40, too_long=policy, validation=0.5)
        found[policy] = prepare_chats(recipe, FORMAT, True, cache=tmp_path / "cache")
    facts = {policy: vars(corpus.facts["train"]) | {"answer_bytes": 0} for policy, corpus in found.items()}
    assert facts["cut"] | {"answer_tokens": 0} == {
        "kept": 2, "answer_tokens": 0, "answer_bytes": 0, "longer": 1, "left_out": 1
    }  # fmt: skip
    assert [(c.facts["validation"].kept, c.facts["validation"].longer) for c in found.values()] == [(3, 1), (2, 1)]
    assert found["cut"].summary("chats", 40) == (
        "2 chats to train on and 3 to validate; 2 have more than 40 tokens: 1 are cut, 1 left out"
    )
    assert found["drop"].summary("chats", 40).endswith("2 have more than 40 tokens: 0 are cut, 2 left out")
    rows = ChatRows(found["cut"].stream("validation"), 40, True)
    texts = [FORMAT.tokenizer.decode(batch) for batch in rows.batch(np.arange(len(rows))).inputs]
    assert any(text.endswith("b") for text in texts), "the end of turn was cut off too: no false end is learned"


def packed_row() -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Nine chats in a row `[1, T]`, with their marks, and where each is."""
    stored = []
    for i in range(9):
        chat = FORMAT.labelled(line("?" * i, "!" * (1 + i % 3))["messages"])
        stored.append(chat.tokens | np.where(chat.answers, ANSWER, 0))
        stored[-1][0] |= START
    cuts = np.cumsum([0, *map(len, stored)]).tolist()
    return torch.from_numpy(np.concatenate(stored))[None], list(pairwise(cuts))


def logits(model: PrismForCausalLM, stored: torch.Tensor, separate: bool = True) -> torch.Tensor:
    batch = batch_of(stored, separate)
    with torch.no_grad():
        return model(batch.inputs, reset=batch.reset, use_cache=False).logits[0]


@pytest.mark.parametrize("form", ["recurrent", "auto"])
def test_a_packed_chat_is_the_chat_alone(form: str) -> None:
    """Token by token, bit for bit. In chunks up to rounding: a chunk's sums of decays then run over other chats too."""
    torch.manual_seed(0)
    layers = {"vocab_size": 257, "hidden_size": 16, "num_heads": 2, "layers": "prism+gated_delta+softmax"}
    model = PrismForCausalLM(PrismConfig(**layers, num_hidden_layers=3, form=form)).double().eval()
    row, places = packed_row()
    together = logits(model, row)
    for start, stop in places:
        alone, others = torch.full_like(row, FORMAT.tokenizer.end), torch.randint(256, row.shape) | (row & START)
        for changed in (alone, others):
            changed[:, start:stop] = row[:, start:stop]
            found = logits(model, changed)[start:stop]
            assert form != "recurrent" or torch.equal(found, together[start:stop])
            torch.testing.assert_close(found, together[start:stop], rtol=0, atol=1e-13)
        # A matrix product of fewer rows may be summed in another order.
        torch.testing.assert_close(logits(model, row[:, start:stop]), together[start:stop], rtol=0, atol=1e-13)
    start, stop = places[1]
    assert not torch.allclose(logits(model, row, separate=False)[start:stop], together[start:stop], atol=1e-6)


def test_rows_are_made_once_and_again_for_another_template(tmp_path: Path) -> None:
    recipe = ChatRecipe((write(tmp_path, [line("a", "b")] * 4),), context=32, validation=0.5)
    said: list[str] = []
    for _ in range(2):
        prepare_chats(recipe, FORMAT, True, cache=tmp_path / "cache", report=said.append)
    assert len(said) == 1
    other = ChatFormat(FORMAT.tokenizer, DEFAULT_TEMPLATE.replace("\\n", ":"), FORMAT.special)
    prepare_chats(recipe, other, True, cache=tmp_path / "cache", report=said.append)
    assert len(said) == 2


def test_pairs_stand_side_by_side(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}", "chosen": "good", "rejected": "bad" * i} for i in range(1, 9)]
    recipe = ChatRecipe((write(tmp_path, pairs),), context=64, validation=0.25)
    stream = prepare_chats(recipe, FORMAT, False, pairs=True, cache=tmp_path / "cache").stream("train")
    assert len(chat_starts(stream)) == len(chat_starts(stream, piece=7)) == 2 * 6 + 1
    rows = ChatRows(stream, 64, False)
    texts = [FORMAT.tokenizer.decode(row & TOKEN) for row in rows.read(np.arange(4))]
    assert [text.split("assistant\n")[1] for text in texts] == [
        "good<|end|>",
        "bad<|end|>",
        "good<|end|>",
        "badbad<|end|>",
    ]


def test_answers_of_a_prompt_are_not_learned(tmp_path: Path) -> None:
    prompt = [*line("one", "1")["messages"], {"role": "user", "content": "two"}]
    given = chat_of({"prompt": prompt, "completion": "2"})
    found = FORMAT.labelled(given.messages, given.answered)
    assert FORMAT.tokenizer.decode(found.tokens[found.answers]) == "2<|end|>"
    both = preference_of({"prompt": prompt, "chosen": "2", "rejected": [{"role": "assistant", "content": "3"}]})
    assert (both.chosen.answered, both.rejected.messages[-1]["content"]) == (1, "3")


BAD = {
    '{"messages": 5}': "messages must be a list",
    '{"messages": [{"role": "human", "content": "x"}]}': "the role of message 1 must be one of",
    '{"messages": [{"role": "user", "content": "x"}]}': "there is no answer to learn",
    '{"text": "x"}': "expected messages, or prompt and completion, got text",
    '{"prompt": "x", "completion": 7}': "completion must be a text or a list of messages",
    '{"prompt": [{"role": "assistant", "content": "x"}], "completion": "y"}': "the prompt ends with an answer",
    '[1]': "expected messages, or prompt and completion, got list",
    '{"messages': "is not JSON",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(line('a', 'b'))}\n\n{text}\n")
    with pytest.raises(ValueError, match=rf"chats.jsonl, line 3(: | ).*{message}") as caught:
        list(chats([path]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, "expected prompt, chosen and rejected, got prompt, chosen"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are the same answer"),
        (
            {"prompt": "x", "chosen": "y", "rejected": [{"role": "user", "content": "z"}]},
            "rejected must end with a message",
        ),
    ],
)
def test_a_bad_pair_is_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_of(row)


def test_too_few_chats_and_a_refusing_template_are_one_sentence(tmp_path: Path) -> None:
    recipe = ChatRecipe((write(tmp_path, [line("a", "b")] * 3),), context=32)
    few = r"leaves no chats to validate with \(3 read, 1 in 20 held out, 0 too long\).*a fraction, at most 0\.5"
    with pytest.raises(ValueError, match=few):
        prepare_chats(recipe, FORMAT, True, cache=tmp_path / "cache")
    refusing = ChatFormat(FORMAT.tokenizer, "{{ raise_exception('only poems') }}", FORMAT.special)
    with pytest.raises(ValueError, match=r"chats.jsonl, line 1: the chat template cannot write this chat: only poems"):
        prepare_chats(recipe, refusing, True, cache=tmp_path / "cache")
    silent = ChatFormat(FORMAT.tokenizer, "{{ messages[0].content }}", FORMAT.special)
    with pytest.raises(ValueError, match=r"line 1: the chat template"):
        prepare_chats(recipe, silent, True, cache=tmp_path / "cache")
    assert not [
        path for path in (tmp_path / "cache" / "chats").iterdir() if not path.name.startswith(".") and path.is_dir()
    ]
