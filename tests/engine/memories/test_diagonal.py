"""Diagonal recurrences: every form equals a loop, for factored, complex, masked, reset, chained and chunked inputs."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from prism.engine import InvalidValueError, engine_of
from prism.engine.implementations import LONGEST_CONVOLUTION
from prism.engine.memories import diagonal
from prism.engine.memories.diagonal import Diagonal
from tests.helpers import assert_close, examples
from tests.rules.rule_cases import small_mixer, small_tokens, update_and_extra

B, D, N = 2, 3, 4


def problem(kind: str, T: int, generator: torch.Generator) -> dict[str, Any]:
    """Tensors as a rule of that kind makes them."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    if kind == "vector":
        return {"write": normal(B, T, D), "log_decay": -3 * uniform(B, T, D)}
    u, k, r = normal(B, T, D, 1), normal(B, T, 1, N), normal(B, T, 1, N)
    if kind == "factors":
        return {"write": (u, k), "log_decay": (uniform(B, T, D, 1), -5 * uniform(1, 1, D, N)), "read": r}
    if kind == "forget":
        return {"write": (u, k), "forget": (uniform(B, T, D, 1), uniform(B, T, 1, N)), "read": r}
    A = torch.complex(-uniform(1, 1, D, N), 3 * normal(1, 1, D, N))
    return {"write": (u, torch.complex(normal(1, 1, D, N), normal(1, 1, D, N))), "log_decay": A, "read": A.exp()}


def by_loop(
    tensors: dict[str, Any], state: Tensor | None, reset: Tensor, mask: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """The definition in numpy, number by number."""

    def array(name: str) -> Any:
        value = tensors.get(name)
        parts = value if isinstance(value, tuple) else (value,)
        return None if value is None else np.prod(np.broadcast_arrays(*[p.numpy() for p in parts]), 0)

    x, r = array("write"), array("read")
    a = np.exp(array("log_decay")) if "log_decay" in tensors else 1 - array("forget")
    a, r = np.broadcast_to(a, x.shape), None if r is None else np.broadcast_to(r, x.shape)
    h = np.zeros((B, *x.shape[2:]), a.dtype)
    if state is not None:
        h = (torch.view_as_complex(state) if np.iscomplexobj(a) else state).numpy().copy()
    o = np.zeros(x.shape if r is None else x.shape[:-1])
    for b in range(B):
        for t in range(x.shape[1]):
            if mask[b, t]:
                h[b] = a[b, t] * (0 if reset[b, t] else h[b]) + x[b, t]
                o[b, t] = h[b] if r is None else (r[b, t] * h[b]).sum(-1).real
    return o, h


@pytest.mark.parametrize("kind", ["vector", "factors", "forget", "complex"])
@given(data=st.data())
@examples(8)
def test_every_form_is_the_loop(kind: str, data: st.DataObject) -> None:
    T = data.draw(st.integers(1, 40), label="tokens")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9), label="seed"))
    tensors = problem(kind, T, generator)
    reset, mask = (torch.rand(B, T, generator=generator) < share for share in (0.15, 0.8))
    plain = data.draw(st.booleans(), label="neither masked nor reset")
    if plain:
        reset, mask = torch.zeros_like(reset), torch.ones_like(mask)
    update = Diagonal(**tensors, **({} if plain else {"reset": reset, "mask": mask}))
    state = None
    if data.draw(st.booleans(), label="has an incoming state"):
        state = torch.randn(B, *update.shape[2:], *([2] if kind == "complex" else []), generator=generator).double()
    o, h = by_loop(tensors, state, reset, mask)
    forms = ["recurrent", "scan", *(["parallel"] if kind == "complex" else [])]
    for form in forms:
        got, end = prism.memory(update, state, form)
        assert_close(form, got, torch.from_numpy(o), 1e-12, 1e-6)
        assert not end.is_complex()
        kept = torch.view_as_complex(end) if kind == "complex" else end
        assert_close(form, torch.view_as_real(kept + 0j), torch.view_as_real(torch.from_numpy(h) + 0j), 1e-12, 1e-6)


@pytest.mark.parametrize("kind", ["vector", "factors", "forget", "complex"])
def test_chunks_of_any_length_give_the_same_gradients(kind: str) -> None:
    tensors = problem(kind, 23, torch.Generator().manual_seed(0))
    names = list(tensors)
    flat = [x for name in names for x in diagonal.factors(tensors[name])]
    reset = torch.rand(B, 23, generator=torch.Generator().manual_seed(1)) < 0.1

    def gradients(form: Any) -> list[Tensor]:
        leaves = iter([x.clone().requires_grad_() for x in flat])
        given_ = {name: tuple(next(leaves) for _ in diagonal.factors(tensors[name])) for name in names}
        o, h = form(Diagonal(**given_, reset=reset))
        loss = (o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + h.square().sum()
        return list(torch.autograd.grad(loss, [x for name in names for x in given_[name]]))

    expected = gradients(diagonal.recurrent)
    for chunk in (4, 7, 23, 64):
        got = gradients(lambda update, chunk=chunk: diagonal.scan(update, chunk=chunk))
        for a, b in zip(got, expected, strict=True):
            assert_close(f"chunk {chunk}", torch.view_as_real(a + 0j), torch.view_as_real(b + 0j), 1e-12)


def test_a_scan_saves_one_state_per_chunk() -> None:
    """Autograd saves far less for T tokens of a [D, N] state than T such states."""
    T, D, N = 1024, 8, 64
    saved: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    u, k, step = (torch.randn(1, T, *shape, requires_grad=True) for shape in ((D, 1), (1, N), (D, 1)))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        prism.memory(Diagonal((u, k), (step.square(), -torch.ones(1, 1, D, N)), read=k), form="scan")
    assert sum(saved.values()) < 0.5 * 4 * T * D * N


def test_a_convolution_keeps_its_phase() -> None:
    """After thousands of radians: powers of the decay are computed in float64 for a model of any precision."""
    mixer = small_mixer("s4d", torch.float32)
    exact = small_mixer("s4d", torch.float64)
    exact.load_state_dict(mixer.state_dict())
    x = small_tokens(1, 3000, dtype=torch.float32)
    expected, end = exact(x.double(), form="recurrent")
    y, state = mixer(x, form="parallel")
    assert_close("outputs", y, expected, 1e-5)
    assert_close("state", state.memory, end.memory, 1e-5)


def test_the_convolution_of_s4d_is_its_recurrence() -> None:
    mixer = small_mixer("s4d")
    x = small_tokens(2, 300)
    reset = torch.rand(2, 300) < 0.02
    _, state = mixer(small_tokens(2, 5))
    for flags in ({}, {"reset": reset}, {"mask": torch.rand(2, 300) < 0.7, "reset": reset}):
        expected, end = mixer(x, state, form="recurrent", **flags)
        y, got = mixer(x, state, form="parallel", **flags)
        assert_close("outputs", y, expected, 1e-12)
        assert_close("state", got.memory, end.memory, 1e-12)


def test_a_steady_system_is_convolved_and_a_long_or_packed_one_scanned() -> None:
    update, _ = update_and_extra(small_mixer("s4d").rule, small_tokens(1, 6))
    choose = engine_of(Diagonal).choose
    assert choose(update) == "parallel"
    assert choose(Diagonal(update.write, update.log_decay, read=update.read, reset=torch.zeros(1, 6).bool())) == "scan"
    long = (torch.zeros(1, 1, 1, 1).expand(1, LONGEST_CONVOLUTION + 1, 16, 1), update.write[1])
    assert choose(Diagonal(long, update.log_decay, read=update.read)) == "scan"
    assert choose(update_and_extra(small_mixer("mamba1").rule, small_tokens(1, 6))[0]) == "scan"
    assert choose(update_and_extra(small_mixer("mamba1").rule, small_tokens(1, 1))[0]) == "recurrent"


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"write": torch.zeros(1, 2, 3)}, "exactly one of log_decay and forget"),
        ({"write": torch.zeros(1, 2), "forget": torch.zeros(1, 2)}, "write must be a tensor"),
        ({"write": torch.zeros(1, 2, 3), "forget": torch.zeros(1, 2, 4)}, r"forget has shape \[1, 2, 4\]"),
        (
            {"write": torch.zeros(1, 2, 3), "forget": torch.zeros(1, 2, 3), "mask": torch.ones(1, 2)},
            "mask must be a bool tensor",
        ),
        (
            {"write": torch.zeros(1, 2, 3), "forget": torch.zeros(1, 2, 3), "reset": torch.ones(2, 1).bool()},
            "reset must",
        ),
    ],
)
def test_wrong_tensors_are_named(tensors: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Diagonal(**tensors)


def test_a_positive_log_decay_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="log_decay must be ≤ 0"):
        Diagonal(torch.zeros(1, 2, 3), torch.ones(1, 2, 3))


def test_an_update_that_cannot_be_convolved_is_refused() -> None:
    update, _ = update_and_extra(small_mixer("hgrn").rule, small_tokens(1, 5))
    with pytest.raises(ValueError, match="same at every token: form 'parallel'"):
        prism.memory(update, form="parallel")
    with pytest.raises(ValueError, match=r"state has shape .*, expected \[B, \*S\] = \[1, 16\]"):
        prism.memory(update, torch.zeros(2, 16))
