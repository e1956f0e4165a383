"""Attention against plain loops: every form, any window, groups of heads, padding, documents, caches of uneven rows."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from prism.engine.memories.attention import Attend
from tests.helpers import assert_close

FORMS = ("recurrent", "parallel")


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, reset: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, list[list[int]]]:
    """Outputs, and for every row the tokens the final cache must hold, by loops over rows, tokens and heads."""
    B, T, H, K = q.shape
    o, kept = torch.zeros(B, T, H, v.shape[-1], dtype=q.dtype), []
    for b in range(B):
        seen: list[int] = []
        for t in range(T):
            if mask is not None and not mask[b, t]:
                continue
            if reset is not None and reset[b, t]:
                seen = []
            seen = [*seen, t][-(window or T) :]
            for h in range(H):
                group = h // (H // k.shape[2])
                weights = torch.softmax(k[b, seen, group] @ q[b, t, h] * K**-0.5, 0)
                o[b, t, h] = weights @ v[b, seen, group]
        kept.append(seen if window is None else seen[len(seen) - min(len(seen), window - 1) :])
    return o, kept


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4]))
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    groups = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    real = torch.randint(0, T + 1, (B, 1), generator=generator)
    return {
        "q": normal(B, T, heads, 4),
        "k": normal(B, T, groups, 4),
        "v": normal(B, T, groups, 3),
        "window": draw(st.sampled_from([None, 1, 2, 5, 40])),
        "reset": torch.rand(B, T, generator=generator) < 0.2 if draw(st.booleans()) else None,
        "mask": torch.arange(T) < real if draw(st.booleans()) else None,
    }


@pytest.mark.parametrize("form", FORMS)
@given(problem=problems())
def test_every_form_is_the_definition(form: str, problem: dict[str, Any]) -> None:
    o, cache = prism.memory(Attend(**problem), form=form)
    expected, kept = by_hand(**problem)
    assert_close("o", o, expected, 1e-10)
    slots = cache["k"].shape[1]
    assert slots == (max(map(len, kept)) if problem["window"] is None else problem["window"] - 1)
    assert cache["length"].tolist() == [len(seen) for seen in kept]
    for name in ("k", "v"):
        for b, seen in enumerate(kept):
            empty, full = cache[name][b].split([slots - len(seen), len(seen)])
            assert torch.equal(full, problem[name][b, seen]) and not empty.any()


@pytest.mark.parametrize("form", FORMS)
@given(problem=problems(), data=st.data())
def test_segments_are_the_whole(form: str, problem: dict[str, Any], data: st.DataObject) -> None:
    whole, end = prism.memory(Attend(**problem))
    cut = data.draw(st.integers(1, problem["q"].shape[1]))
    outputs, cache = [], None
    for part in (slice(0, cut), slice(cut, None)):
        segment = {name: x[:, part] if isinstance(x, Tensor) else x for name, x in problem.items()}
        if segment["q"].shape[1]:
            o, cache = prism.memory(Attend(**segment), cache, form)
            outputs.append(o)
    assert_close("o", torch.cat(outputs, 1), whole, 1e-10)
    assert cache is not None
    assert all(torch.equal(cache[name], end[name]) for name in end)


@given(problem=problems())
def test_forms_have_the_same_gradients(problem: dict[str, Any]) -> None:
    found = []
    for form in FORMS:
        leaves = {name: problem[name].clone().requires_grad_() for name in ("q", "k", "v")}
        o, _ = prism.memory(Attend(**{**problem, **leaves}), form=form)
        found.append(torch.autograd.grad(o.square().sum(), list(leaves.values()), allow_unused=True))
    for name, got, expected in zip("qkv", found[1], found[0], strict=True):
        assert_close(f"d{name}", got, expected, 1e-9, scale=1e-6)


def test_padding_may_hold_anything() -> None:
    x = torch.randn(1, 6, 2, 4)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    poisoned = torch.where(mask[..., None, None], x, torch.nan)
    for form in FORMS:
        o, cache = prism.memory(Attend(poisoned, poisoned, poisoned, mask=mask), form=form)
        assert o.isfinite().all() and not o[:, 4:].any()
        assert cache["k"].isfinite().all()


def test_a_long_text_needs_memory_only_for_its_window() -> None:
    """Window attention works in blocks: a full score matrix of these tokens would be 10 GB."""
    x = torch.randn(1, 50_000, 1, 2)
    o, cache = prism.memory(Attend(x, x, x, window=16))
    assert o.shape == x.shape and cache["k"].shape == (1, 15, 1, 2)
    last = torch.softmax(x[0, -16:, 0] @ x[0, -1, 0] * 2**-0.5, 0) @ x[0, -16:, 0]
    assert_close("last token", o[0, -1, 0], last, 1e-5)


X = torch.zeros(2, 5, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"q": X[0]}, r"q must be a tensor of shape \[B, T, H, K\], got torch.float32 \[5, 4, 8\]"),
        ({"k": X[:, :, :3]}, r"k has shape \[2, 5, 3, 8\].*G dividing 4"),
        ({"k": X[:, :, :2]}, r"v has shape \[2, 5, 4, 8\], expected \[B, T, G, V\]"),
        ({"q": X[:, :0], "k": X[:, :0], "v": X[:, :0]}, "q has no tokens"),
        ({"window": 0}, "window must be an integer ≥ 1 or None, got 0"),
        ({"mask": torch.ones(2, 5)}, r"mask must be a bool tensor of shape \[B, T\] = \[2, 5\], got torch.float32"),
        ({"mask": torch.tensor([[False, True, True, True, True]] * 2)}, "mask has padding before real tokens"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Attend(**{"q": X, "k": X, "v": X, **arguments})


def test_a_wrong_cache_is_named() -> None:
    _, cache = prism.memory(Attend(X, X, X, window=4))
    with pytest.raises(
        ValueError, match=r"state 'k' has shape \[2, 3, 4, 8\], expected \[B, S, G, ·\] = \[2, 5, 4, 8\]"
    ):
        prism.memory(Attend(X, X, X, window=6), cache)
    with pytest.raises(ValueError, match="must be a dict of the tensors k, v and length"):
        prism.memory(Attend(X, X, X), torch.zeros(2, 4, 8, 8))
    with pytest.raises(
        ValueError, match="form 'chunkwise' cannot serve Attend, which has the forms recurrent, parallel"
    ):
        prism.memory(Attend(X, X, X), form="chunkwise")
