"""Under torch.autocast a memory keeps its own precision; attention follows."""

from __future__ import annotations

import torch

import prism


def test_a_memory_is_computed_in_float32_whatever_autocast_says() -> None:
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
