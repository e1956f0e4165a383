"""Under torch.autocast a memory keeps its precision; attention follows autocast."""

from __future__ import annotations

import pytest
import torch

import prism


def test_a_memory_is_computed_in_float32_under_autocast() -> None:
    x = torch.randn(2, 70, 2, 2, 8)
    q, k, w = x[..., 0, :], x, torch.randn(2, 70, 2, 2, 4)
    update = prism.Update(
        q, k, w, -torch.rand(2, 70, 2), erase_key=k[..., 0, :] / 4, erase_strength=torch.rand(2, 70, 2)
    )
    for form in ("recurrent", "parallel", "chunkwise", "scan"):
        plain, state = prism.memory(update, form=form)
        with torch.autocast("cpu", torch.bfloat16):
            cast, cast_state = prism.memory(update, form=form)
            assert torch.is_autocast_enabled("cpu")
        assert cast_state.dtype == torch.float32
        assert torch.equal(plain, cast) and torch.equal(state, cast_state), form


def test_the_backward_of_the_chunk_form_keeps_its_precision_under_autocast() -> None:
    """For users who run the whole training step, backward included, inside the autocast block."""
    k = torch.randn(2, 70, 2, 2, 8, requires_grad=True)
    w, g = torch.randn(2, 70, 2, 2, 4, requires_grad=True), -torch.rand(2, 70, 2)
    for beta in (None, torch.rand(2, 70, 2)):
        erase = {} if beta is None else {"erase_strength": beta, "erase_first": True}
        o, state = prism.memory(prism.Update(k[..., 0, :], k / 4, w, g, **erase), form="chunkwise")
        plain = torch.autograd.grad([o.sum(), state.sum()], [k, w], retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            cast = torch.autograd.grad([o.sum(), state.sum()], [k, w])
        assert all(map(torch.equal, plain, cast))


@pytest.mark.parametrize("rule", prism.rules.names())
def test_every_rule_learns_with_the_whole_step_under_autocast(rule: str) -> None:
    mixer, x = prism.Mixer(rule, 16, 2), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        y, _ = mixer(x, state)
        y.float().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in mixer.parameters())
    assert any(p.grad is not None and bool(p.grad.any()) for p in mixer.parameters())
