"""The chunk and decode kernels against the float64 recurrence (float32, small shapes: Triton's interpreter is slow).

A kernel's error may be at most twice that of the same computation in torch with the same input dtype, both against float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism.engine.kernels.available import tile_widths
from prism.rules.parts import l2_normalize
from tests.engine.kernels.where import DEVICE, needs_kernels

pytestmark = needs_kernels


def problem(
    T: int, L: int = 2, K: int = 16, V: int = 16, *, erase: str = "first", decay: float | None = 0.1, **more: Any
):
    """The tensors of an update in float32, and its reset and mask."""
    B, H = 2, 2
    generator = torch.Generator(DEVICE).manual_seed(T * 100 + L)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = draw(B, T, H, L, K)
    if more.pop("correlated", False):
        keys = draw(B, 1, H, L, K) + 0.03 * keys
    leaves = {"q": l2_normalize(draw(B, T, H, K)), "k": l2_normalize(keys), "w": draw(B, T, H, L, V)}
    if decay is not None:
        leaves["log_decay"] = -decay * torch.rand(B, T, H, generator=generator)
    if erase in ("first", "own"):
        leaves["erase_strength"] = torch.rand(B, T, H, generator=generator)
    if erase == "own":
        leaves["erase_key"] = l2_normalize(draw(B, T, H, K))
    if erase == "write first":  # a strength for each channel of the first key
        leaves["erase_key"] = torch.rand(B, T, H, K, generator=generator) * leaves["k"][..., 0, :]
    leaves["state"] = draw(B, H, K, V)
    flags = {}
    if more.pop("packed", False):
        flags["reset"] = torch.rand(B, T, generator=generator) < 0.1
        flags["mask"] = torch.rand(B, T, generator=generator) < 0.8
    return leaves, flags


def run(
    leaves: dict[str, Tensor], flags: dict[str, Tensor], dtype: torch.dtype, form: str, backend: str
) -> dict[str, Tensor]:
    device = DEVICE if backend == "triton" else "cpu"
    x = {name: z.to(device, dtype).requires_grad_() for name, z in leaves.items()}
    fields = {name: z for name, z in x.items() if name != "state"}
    if "erase_strength" in x and "erase_key" not in x:
        fields["erase_key"] = x["k"][..., 0, :]
    write_first = "erase_key" in x and "erase_strength" not in x
    update = prism.Update(**fields, **{name: z.to(device) for name, z in flags.items()}, erase_write_first=write_first)
    o, state = prism.memory(update, x["state"], form, backend)
    weight = torch.linspace(-1, 1, o.shape[-1], device=device, dtype=dtype)
    loss = (o * weight).square().sum() + (state * weight).sum()
    gradients = torch.autograd.grad(loss, list(x.values()))
    named = {f"d_{name}": g for name, g in zip(x, gradients, strict=True)}
    return {name: z.detach().double().cpu() for name, z in {"o": o, "end": state, **named}.items()}


def check(leaves: dict[str, Tensor], flags: dict[str, Tensor]) -> None:
    exact = run(leaves, flags, torch.float64, "recurrent", "torch")
    plain = run(leaves, flags, torch.float32, "chunkwise", "torch")
    kernel = run(leaves, flags, torch.float32, "chunkwise", "triton")
    for name, reference in exact.items():
        size = reference.norm().clamp(min=1e-6)
        error, allowed = (kernel[name] - reference).norm() / size, (plain[name] - reference).norm() / size
        assert error <= max(2 * allowed.item(), 2e-6), f"{name}: {error:.2e}, torch has {allowed:.2e}"


@pytest.mark.parametrize("T", [1, 5, 64, 70])
def test_any_length(T: int) -> None:
    check(*problem(T))


@pytest.mark.parametrize("L", [1, 3, 4])
def test_any_number_of_writes(L: int) -> None:
    check(*problem(33, L))


@pytest.mark.parametrize(("K", "V"), [(32, 16), (20, 12)])
def test_any_width(K: int, V: int) -> None:
    check(*problem(20, K=K, V=V))


@pytest.mark.parametrize("erase", ["none", "own", "write first"])
def test_erase_along_a_separate_key_or_none(erase: str) -> None:
    check(*problem(40, erase=erase))


@pytest.mark.parametrize("decay", [None, 50.0])
def test_no_decay_and_a_strong_one(decay: float | None) -> None:
    check(*problem(40, decay=decay))


def test_nearly_equal_keys() -> None:
    check(*problem(65, correlated=True))


def test_padding_and_packed_documents() -> None:
    check(*problem(50, packed=True))


def test_chained_segments_equal_one_pass() -> None:
    leaves, _ = problem(40)
    state = leaves.pop("state")
    whole = prism.memory(_update(leaves), state, "chunkwise", "triton")
    parts = []
    for start, end in ((0, 7), (7, 33), (33, 40)):
        o, state = prism.memory(_update({n: z[:, start:end] for n, z in leaves.items()}), state, "chunkwise", "triton")
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, whole[1], rtol=1e-5, atol=1e-5)


def test_decode_steps_equal_the_recurrence() -> None:
    leaves, _ = problem(6, L=3)
    state = leaves.pop("state")
    expected, end = prism.memory(_update(leaves), state, "recurrent", "torch")
    with torch.no_grad():
        for t in range(6):
            o, state = prism.memory(
                _update({n: z[:, t : t + 1] for n, z in leaves.items()}), state, "recurrent", "triton"
            )
            torch.testing.assert_close(o[:, 0], expected[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-5)


def _update(leaves: dict[str, Tensor]) -> prism.Update:
    return prism.Update(**leaves, erase_key=leaves["k"][..., 0, :])


@pytest.mark.parametrize("T", [1, 70])
def test_the_state_is_not_rounded_for_the_gates_gradient(T: int) -> None:
    """In half precision. ⟨gradient, state⟩ is nearly all of the gradient of the decay here."""
    leaves, _ = problem(T, erase="none")
    d_end = torch.randn(leaves["state"].shape, generator=torch.Generator(DEVICE).manual_seed(0))

    def gradient(dtype: torch.dtype, kept: torch.dtype, form: str, backend: str) -> Tensor:
        device = DEVICE if backend == "triton" else "cpu"
        x = {name: z.half().to(device, dtype) for name, z in leaves.items() if name in ("q", "k", "w")}
        decay = leaves["log_decay"].to(device, kept).requires_grad_()
        update = prism.Update(**{name: 1e-3 * z for name, z in x.items()}, log_decay=decay)
        _, end = prism.memory(update, leaves["state"].to(device, kept), form, backend)
        return torch.autograd.grad(end, decay, d_end.to(device, kept))[0].double().cpu()

    exact = gradient(torch.float64, torch.float64, "recurrent", "torch")
    kernel = gradient(torch.float16, torch.float32, "chunkwise", "triton")
    error = (kernel - exact).norm() / exact.norm()
    assert error < (1e-6 if T == 1 else 1e-3), f"{error:.1e}"


def test_the_first_gate_of_an_empty_memory_has_no_gradient() -> None:
    """In half precision. It is a sum over rows minus one over columns, which cancels only if both round in the same way."""
    leaves, _ = problem(40)
    given = {name: leaves[name].half() for name in ("q", "k", "w")}
    decay, strength = leaves["log_decay"].requires_grad_(), 0.1 + 1.9 * leaves["erase_strength"]
    update = prism.Update(**given, log_decay=decay, erase_strength=strength, erase_first=True)
    o, _ = prism.memory(update, None, "chunkwise", "triton")
    (gradient,) = torch.autograd.grad(o.float().square().sum(), decay)
    assert gradient[:, 0].abs().max() <= 1e-5 * gradient.abs().max()


def test_a_gate_that_forgets_everything_does_not_affect_its_neighbours() -> None:
    """In half precision, sums of gates are float32, and one large gate would take all digits of the sum."""
    leaves, _ = problem(30, erase="none")
    leaves = {name: z.half().float() for name, z in leaves.items()}
    leaves["log_decay"][:, 3] = -1e9

    def results(dtype: torch.dtype, kept: torch.dtype, form: str, backend: str) -> list[Tensor]:
        device = DEVICE if backend == "triton" else "cpu"
        x = {name: leaves[name].to(device, dtype) for name in ("q", "k", "w")}
        decay = leaves["log_decay"].to(device, kept).requires_grad_()
        o, end = prism.memory(prism.Update(**x, log_decay=decay), None, form, backend)
        (d_decay,) = torch.autograd.grad(o.sum(), decay)
        return [z.detach().double().cpu() for z in (o, end, d_decay)]

    exact = results(torch.float64, torch.float64, "recurrent", "torch")
    for got, wanted in zip(results(torch.float16, torch.float32, "chunkwise", "triton"), exact, strict=True):
        assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize(
    ("given", "expected"),
    [((20, 36), (32, 64)), ((32, 32), (32, 32)), ((16, 8), (16, 32)), ((16, 256), (64, 256)), ((128, 24), (128, 32))],
)
def test_on_a_gpu_only_checked_tile_sizes_are_used(given: tuple[int, int], expected: tuple[int, int]) -> None:
    assert tile_widths(*given, on_gpu=True) == expected
