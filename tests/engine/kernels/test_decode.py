"""The decode kernel against the recurrence: every option of an update, in place or not, float32 and bfloat16 states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prism
from prism.engine import memory_
from tests.engine.kernels.where import CAN_START, DEVICE, needs_kernels

pytestmark = needs_kernels

if CAN_START:
    from prism.engine.kernels.token import decode


@st.composite
def updates(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """The tensors of an update in float64, its options, and a state."""
    B, T, n = (draw(st.integers(1, most)) for most in (2, 3, 3))
    L = draw(st.sampled_from([1, 2, 3, 4, 9]))
    H = draw(st.sampled_from([1, 2, 4]))
    K, V = draw(st.sampled_from([(16, 16), (5, 40), (20, 3)]))
    groups = st.sampled_from([g for g in (1, 2, 4) if H % g == 0])
    generator = torch.Generator(DEVICE).manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    tensors = {"q": normal(B, T, draw(groups), K), "k": normal(B, T * n, draw(groups), L, K)}
    tensors["w"] = normal(B, T * n, H, L, V)
    decay = draw(st.sampled_from(["none", "head", "channel"]))
    if decay != "none":
        shape = (B, T, H, K) if decay == "channel" else (B, T, H)
        strength = draw(st.sampled_from([0.2, 50.0]))
        tensors["log_decay"] = -strength * torch.rand(*shape, generator=generator, dtype=torch.float64)
    erase = draw(st.sampled_from(["none", "first", "own", "write", "write first"]))
    if erase in ("own", "write", "write first"):
        tensors["erase_key"] = normal(B, T * n, draw(groups), K)
    if erase in ("first", "own"):
        tensors["erase_strength"] = torch.rand(B, T * n, H, generator=generator, dtype=torch.float64)
    if erase == "write":
        tensors["erase_write"] = normal(B, T * n, draw(groups), K)
    options: dict[str, Any] = {
        "substeps": n,
        "erase_first": erase == "first",
        "erase_on": draw(st.sampled_from(["decayed", "undecayed"])),
        "read": draw(st.sampled_from(["after", "before"])),
    }
    for name in ("reset", "mask"):
        if draw(st.booleans()):
            options[name] = torch.rand(B, T, generator=generator) < 0.5
    if erase == "write first":
        options["write first"] = True
    return tensors, options, normal(B, H, K, V)


def build(tensors: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype) -> prism.Update:
    fields = {name: z.to(dtype) for name, z in tensors.items()}
    options = dict(options)
    if options.pop("write first", False):  # a view of k: evenly strided
        fields["erase_write"] = fields["k"][..., 0, :]
    return prism.Update(**fields, **options)


@settings(max_examples=20)
@given(updates())
def test_any_update_out_of_place_and_in_place(problem: tuple[dict[str, Tensor], dict[str, Any], Tensor]) -> None:
    tensors, options, state = problem
    expected, end = prism.memory(build(tensors, options, torch.float64), state, "recurrent", "torch")
    single = build(tensors, options, torch.float32)
    o, got = prism.memory(single, state.float(), "recurrent", "triton")
    torch.testing.assert_close((o.double(), got.double()), (expected, end), rtol=1e-5, atol=1e-5)
    kept = state.float()
    assert torch.equal(memory_(single, kept, "triton"), o)
    assert torch.equal(kept, got)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_bfloat16_state_is_rounded_to_nearest_after_the_last_token(backend: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, w = (torch.randn(2, 3, 2, *more, 16, generator=generator) for more in ((), (2,), (2,)))
    u = prism.Update(q, k, w, -torch.rand(2, 3, 2, generator=generator))
    state = torch.randn(2, 2, 16, 16, generator=generator).bfloat16()
    expected, end = prism.memory(u, state.float(), "recurrent", backend)
    o = memory_(u, state, backend)
    assert torch.equal(o, expected)
    if backend == "triton" and DEVICE == "cpu":  # Triton's interpreter cuts the digits off
        torch.testing.assert_close(state.float(), end, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(state, end.bfloat16())


def test_the_operator_keeps_the_dtype_of_the_state() -> None:
    q, k, w = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 1, 16), torch.randn(1, 1, 1, 1, 16)
    for dtype in (torch.float32, torch.bfloat16):
        state = torch.zeros(1, 1, 16, 16, dtype=dtype)
        assert decode.step(q, k, w, *[None] * 6, state)[1].dtype == dtype
    with pytest.raises(ValueError, match="float32 or bfloat16, got"):
        decode.step_(q, k, w, *[None] * 6, state.half())
