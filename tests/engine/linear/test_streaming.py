"""Long streams, token by token: the memory stays finite and equal to the chunk form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import prism
from prism.engine import step
from tests.helpers import assert_close

H, K, V = 1, 4, 3
SEGMENT = 5000


def _keys(tokens: int, writes: int) -> Tensor:
    return F.normalize(torch.randn(1, tokens, H, writes, K), dim=-1)


def linear(tokens: int) -> dict[str, Tensor]:
    return {"k": _keys(tokens, 1), "w": torch.randn(1, tokens, H, 1, V)}


def delta(tokens: int) -> dict[str, Tensor]:
    """β over all of [0, 2]: reflections included, and no decay that would forget rounding errors."""
    k, beta = _keys(tokens, 1), 2 * torch.rand(1, tokens, H)
    v = torch.randn(1, tokens, H, 1, V)
    return {"k": k, "w": beta[..., None, None] * v, "erase_key": k[..., 0, :], "erase_strength": beta}


def gated_delta(tokens: int) -> dict[str, Tensor]:
    k, beta = _keys(tokens, 1), torch.rand(1, tokens, H)
    w = beta[..., None, None] * torch.randn(1, tokens, H, 1, V)
    decay = -0.1 * torch.rand(1, tokens, H)
    return {"k": k, "w": w, "log_decay": decay, "erase_key": k[..., 0, :], "erase_strength": beta}


def prism_of_rank_two(tokens: int) -> dict[str, Tensor]:
    k, beta = _keys(tokens, 2), torch.rand(1, tokens, H, 2)
    w = beta.unsqueeze(-1) * torch.randn(1, tokens, H, 2, V)
    decay = F.logsigmoid(4 + torch.randn(1, tokens, H))
    return {"k": k, "w": w, "log_decay": decay, "erase_key": k[..., 0, :], "erase_strength": beta[..., 0]}


RULES = [linear, delta, gated_delta, prism_of_rank_two]
Rule = Callable[[int], dict[str, Tensor]]


def segments(rule: Rule, tokens: int) -> Iterator[prism.Update]:
    """The stream in segments of a few thousand tokens; the same for the same count."""
    torch.manual_seed(1)
    for _ in range(tokens // SEGMENT):
        yield prism.Update(q=torch.randn(1, SEGMENT, H, K), **rule(SEGMENT))


def tokens_of(update: prism.Update) -> Iterator[prism.Update]:
    names = ("q", "k", "w", "log_decay", "erase_key", "erase_strength")
    fields = {name: x for name in names if (x := getattr(update, name)) is not None}
    for row in zip(*[x.split(1, 1) for x in fields.values()], strict=True):
        yield prism.Update(**dict(zip(fields, row, strict=True)))


@torch.inference_mode()
def stream_and_compare(rule: Rule, tokens: int) -> None:
    stepped = chunked = None
    for update in segments(rule, tokens):
        outputs = []
        for token in tokens_of(update):
            o, stepped = step(token, stepped)
            outputs.append(o)
        expected, chunked = prism.memory(update, chunked, "chunkwise")
        assert_close("o", torch.cat(outputs, 1), expected, 1e-4)
    assert stepped is not None and chunked is not None
    assert stepped.dtype == torch.float32
    assert torch.isfinite(stepped).all()
    assert_close("state", stepped, chunked, 1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_10_000_tokens_streamed_equal_chunks(rule: Rule) -> None:
    stream_and_compare(rule, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_100_000_tokens_streamed_equal_chunks(rule: Rule) -> None:
    stream_and_compare(rule, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_a_million_tokens_stay_finite(rule: Rule) -> None:
    state = None
    for update in segments(rule, 1_000_000):
        for token in tokens_of(update):
            o, state = step(token, state)
        assert torch.isfinite(o).all()
        assert state is not None and torch.isfinite(state).all()
