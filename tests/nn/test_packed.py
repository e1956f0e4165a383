"""Documents packed into one row, given by offsets as in flash-linear-attention, are computed as if each were alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prism
from prism import Mixer
from prism.engine.inputs import packed_starts

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@given(lengths=LENGTHS, rule=st.sampled_from(["prism", "mamba2", "rwkv7", "softmax", "hgrn"]))
def test_documents_in_a_row_equal_documents_alone(lengths: list[int], rule: str) -> None:
    torch.manual_seed(0)
    mixer, x = Mixer(rule, 16, 2), torch.randn(1, sum(lengths), 16)
    with torch.no_grad():
        y, state = mixer(x, cu_seqlens=offsets(lengths))
        alone = [mixer(part) for part in x.split(lengths, 1) if part.shape[1]]
    torch.testing.assert_close(y, torch.cat([out for out, _ in alone], 1), rtol=1e-4, atol=1e-5)
    if lengths[-1] and rule != "softmax":  # a cache also keeps what it no longer looks at
        torch.testing.assert_close(state.memory, alone[-1][1].memory, rtol=1e-4, atol=1e-5)


def test_the_first_document_continues_the_state() -> None:
    mixer, x = Mixer("gla", 16, 2), torch.randn(1, 12, 16)
    whole, _ = mixer(x, cu_seqlens=torch.tensor([0, 7, 12], dtype=torch.int32))
    first, state = mixer(x[:, :4])
    second, _ = mixer(x[:, 4:], state, cu_seqlens=torch.tensor([0, 3, 8]))
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["gla", "prism", "softmax", "rg_lru"])
def test_the_second_document_is_fresh_even_if_the_first_is_empty(rule: str) -> None:
    torch.manual_seed(0)
    mixer, x = Mixer(rule, 16, 2), torch.randn(1, 12, 16)
    state = mixer(x[:, :4])[1]
    alone = mixer(x[:, 4:])[0]
    for mask in (None, torch.ones(1, 8, dtype=torch.bool)):
        again = mixer(x[:, 4:], state, mask=mask, cu_seqlens=torch.tensor([0, 0, 8]))[0]
        torch.testing.assert_close(again, alone, rtol=1e-4, atol=1e-5)
    last, new = mixer(x[:, 4:], state, cu_seqlens=torch.tensor([0, 3, 8, 8]))
    expected, wanted = mixer(x[:, 4:], state, cu_seqlens=torch.tensor([0, 3, 8]))
    assert torch.equal(last, expected)
    assert all(torch.equal(z, wanted.tensors()[name]) for name, z in new.tensors().items())


@given(lengths=LENGTHS, rule=st.sampled_from(["gla", "prism", "softmax"]), seed=st.integers(0, 99))
def test_documents_may_start_with_padding(lengths: list[int], rule: str, seed: int) -> None:
    torch.manual_seed(seed)
    mixer, x = Mixer(rule, 16, 2), torch.randn(1, sum(lengths), 16)
    mask = torch.rand(1, sum(lengths)) < 0.5
    with torch.no_grad():
        y, _ = mixer(x, mask=mask, cu_seqlens=offsets(lengths))
        parts = zip(x.split(lengths, 1), mask.split(lengths, 1), strict=True)
        alone = [mixer(part, mask=real)[0] for part, real in parts if part.shape[1]]
    torch.testing.assert_close(y, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def test_starts_on_padding_move_in_updates_too() -> None:
    q, k, w = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 1, 4), torch.randn(1, 5, 2, 1, 3)
    mask = torch.tensor([[True, True, True, False, True]])
    reset = prism.Update(q, k, w, mask=mask, cu_seqlens=torch.tensor([0, 3, 5])).reset
    assert reset is not None and reset.nonzero()[:, 1].tolist() == [4]
    own = prism.Update(q, k, w, mask=mask, reset=torch.tensor([[False, False, False, True, False]])).reset
    assert own is not None and own.nonzero()[:, 1].tolist() == [3], "a reset on padding stays one that is ignored"


def test_an_update_takes_offsets() -> None:
    q, k, w = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 2, 1, 4), torch.randn(1, 9, 2, 1, 3)
    packed = prism.Update(q, k, w, cu_seqlens=torch.tensor([0, 4, 9]))
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 4] = True
    assert packed.reset is not None and torch.equal(packed.reset, reset)
    assert torch.equal(prism.memory(packed)[0], prism.memory(prism.Update(q, k, w, reset=reset))[0])
    again = replace(packed, q=2 * q)
    assert again.reset is packed.reset


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        ([0, 5], (2, 5), "cu_seqlens packs documents into one row .1, T., got 2 rows: flatten them, or use reset"),
        ([0, 4], (1, 5), r"cu_seqlens must rise from 0 to the number of tokens, 5, got \[0, 4\]"),
        ([1, 5], (1, 5), r"got \[1, 5\]"),
        ([0, 3, 2, 5], (1, 5), r"got \[0, 3, 2, 5\]"),
        ([5], (1, 5), "cu_seqlens must be an integer tensor of n . 1 offsets, got"),
        ([0.0, 5.0], (1, 5), "cu_seqlens must be an integer tensor"),
    ],
)
def test_offsets_that_say_nothing_sensible(given: list[Any], shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        packed_starts(torch.tensor(given), None, shape)
    assert "\n" not in str(raised.value)


def test_both_ways_at_once_are_refused() -> None:
    mixer, x = Mixer("linear", 8, 1), torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="reset and cu_seqlens both say where documents start: give one of them"):
        mixer(x, reset=torch.zeros(1, 3, dtype=torch.bool), cu_seqlens=torch.tensor([0, 3]))


def test_compiled_code_takes_offsets_without_a_break() -> None:
    mixer, x, where = Mixer("gla", 16, 2), torch.randn(1, 9, 16), torch.tensor([0, 4, 9])
    compiled = torch.compile(lambda x, c: mixer(x, cu_seqlens=c)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, where), mixer(x, cu_seqlens=where)[0], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
