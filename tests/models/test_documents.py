"""Documents in one stream: document 2 is independent of document 1, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prism.documents import document_starts, needed_starts
from prism.language.generate import Reader
from prism.language.task import loss_sum
from prism.language.tokens import Batch, Sequences
from prism.models import PrismForCausalLM
from tests.helpers import assert_close
from tests.models.stacks import HYBRIDS, STACKS, VOCABULARY, label, model

END = 3
ids = st.integers(0, VOCABULARY - 1)
EXACT = [stack for stack in STACKS if "mom" not in stack]
"""A mixture of memories groups a row's tokens by memory, so document 1 decides which tokens of document 2 are summed
together: it is equal up to rounding (tested below), not bit for bit. Its balance loss is one of the whole batch."""


@cache
def small(layers: Any, dtype: torch.dtype) -> PrismForCausalLM:
    return model(layers, dtype)


class Tokens:
    """A stream that is in memory."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = np.array(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop]


def window(tokens: list[int]) -> Batch:
    return Sequences(Tokens(tokens), len(tokens) - 1, END).batch(np.arange(1))


@st.composite
def two_documents(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """Document 1, another one of its length, and the stream from the end token between the documents on."""
    length = draw(st.integers(1, 70))
    words = ids.filter(lambda token: token != END)
    first, other = (draw(st.lists(words, min_size=length, max_size=length)) for _ in range(2))
    return first, other, [END, *draw(st.lists(ids, min_size=2, max_size=20))]


def trained(lm: PrismForCausalLM, tokens: list[int], start: int) -> dict[str, Tensor]:
    """What training computes from `start` on: logits, the loss's gradients by token, and the state after the last."""
    batch = window(tokens)
    held: dict[str, Tensor] = {}
    hooks = [
        lm.get_input_embeddings().register_forward_hook(lambda _, __, x: held.setdefault("embeddings", x)),
        lm.lm_head.register_forward_hook(lambda _, __, x: held.setdefault("logits", x)),
    ]
    (gradients,) = torch.autograd.grad(loss_sum(lm.train(), batch), held["embeddings"])
    for hook in hooks:
        hook.remove()
    state = lm(batch.inputs, reset=batch.reset, use_cache=True).past_key_values.tensors()
    return {"logits": held["logits"][:, start:], "gradients": gradients[:, start:], **state}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("layers", EXACT, ids=label)
def test_training_on_a_document_depends_on_no_other(layers: Any) -> None:
    lm = small(layers, torch.float32)
    rest = [END, *torch.arange(5, 30).tolist(), END, 9, 8]
    assert_same(*(trained(lm, [*range(start, start + 40), *rest], 40) for start in (4, 15)))


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_the_loss_of_a_document_teaches_nothing_about_another(layers: Any) -> None:
    """Its gradient at the tokens of document 1 is zero, up to the rounding of sums over a chunk's decays."""
    lm = small(layers, torch.float64)
    batch = window([*range(4, 24), END, *range(5, 30), END, 9, 8])
    x = lm.get_input_embeddings()(batch.inputs).detach().requires_grad_()
    logits = lm(inputs_embeds=x, reset=batch.reset).logits[0, 20:46]
    (gradients,) = torch.autograd.grad(F.cross_entropy(logits, batch.targets[0, 20:46], reduction="sum"), x)
    assert gradients[:, :20].abs().max() < 1e-12 * gradients.abs().max()
    assert gradients[:, 46:].abs().max() == 0
    assert gradients[:, 20].abs().max() > 0, "the end token opens document 2"


@pytest.mark.parametrize("layers", HYBRIDS)
@given(two_documents())
@settings(max_examples=8)
def test_training_on_any_document_depends_on_no_other(
    layers: str, documents: tuple[list[int], list[int], list[int]]
) -> None:
    lm = small(layers, torch.float32)
    first, other, rest = documents
    assert_same(trained(lm, first + rest, len(first)), trained(lm, other + rest, len(first)))


def read(lm: PrismForCausalLM, tokens: list[int], segment: int) -> tuple[Tensor, dict[str, Tensor]]:
    reader = Reader(lm, END)
    logits = [reader.read(part) for part in torch.tensor(tokens).split(segment)]
    return torch.cat(logits), {**reader.cache.tensors(), "tokens": torch.tensor(0)}


@pytest.mark.parametrize("layers", HYBRIDS)
@given(two_documents(), st.integers(1, 40))
@settings(max_examples=8)
def test_reading_a_document_depends_on_no_other(
    layers: str, documents: tuple[list[int], list[int], list[int]], segment: int
) -> None:
    lm = small(layers, torch.float32)
    first, other, rest = documents
    (logits, state), (others, other_state) = (read(lm, tokens + rest, segment) for tokens in (first, other))
    assert torch.equal(logits[len(first) :], others[len(first) :])
    assert_same(state, other_state)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_training_reading_and_packed_positions_agree_on_where_documents_start(layers: Any) -> None:
    """Also on the first tokens after an end token, which are predicted from it."""
    lm = small(layers, torch.float64)
    tokens = [5, 6, 7, 8, END, 9, 10, 11, END, END, 12, 13, 14, END, 15]
    batch = window(tokens)
    trained = lm(batch.inputs, reset=batch.reset).logits
    alone = [lm(part[None]).logits for part in batch.inputs[0].tensor_split([4, 8, 9, 13])]
    assert_close("alone", trained, torch.cat(alone, 1), 1e-9)
    positions = torch.tensor([[*range(4), *range(4), 0, *range(4), 0]])
    assert torch.equal(lm(batch.inputs, position_ids=positions).logits, trained)
    for segment in (1, 5, 20):
        assert_close(f"read by {segment}", read(lm, tokens[:-1], segment)[0].double(), trained[0], 1e-5)


@given(st.lists(st.lists(ids, min_size=4, max_size=4), min_size=1, max_size=3), st.booleans())
def test_starts_that_change_nothing_are_left_out(rows: list[list[int]], fresh: bool) -> None:
    starts = document_starts(torch.tensor(rows), END)
    assert starts.tolist() == [[token == END for token in row] for row in rows]
    matter = any(token == END for row in rows for token in row[fresh:])
    assert needed_starts(starts, fresh) is (starts if matter else None)
