"""Convolution and columns in one operator, against their definition: `short_conv`, then `delta_columns`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prism
from prism.engine import layer_ops
from prism.engine.layer_ops import UNIT_EPS, Columns, Corrections, delta_columns, one_operator_serves, short_conv
from prism.nn.block import Block
from tests.engine.kernels.where import CAN_START, needs_kernels
from tests.helpers import assert_close, unwritten_memory_is_nan

pytestmark = needs_kernels

if CAN_START:
    from prism.engine.kernels.ops import conv_columns as kernel

Given = tuple[Tensor | None, ...]


@contextmanager
def short_strips(tokens: int) -> Iterator[None]:
    """Strips of so many tokens, so that few tokens have several."""
    kept = kernel.TILE["STRIP"], kernel.BACKWARD_TILE["STRIP"]
    try:
        kernel.TILE["STRIP"] = kernel.BACKWARD_TILE["STRIP"] = tokens
        yield
    finally:
        kernel.TILE["STRIP"], kernel.BACKWARD_TILE["STRIP"] = kept


def draw(T: int, H: int, K: int, V: int, W: int, later: int = 0, parts: tuple[bool, ...] = (True,) * 3) -> Given:
    """Projections, taps and β, and the keys, expected values, gains, β and γ of the later writes, in float64."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, T, *shape, dtype=torch.float64)

    D = H * (2 * K + V)
    first = normal(D), torch.randn(W, D, dtype=torch.float64), normal(H).sigmoid()
    if not later:
        return *first, *[None] * 5
    found = normal(H, later, K), normal(H, V), normal(H, later, V)
    scale = torch.randn(later, H, V, dtype=torch.float64)
    chosen = [z if wanted else None for z, wanted in zip(found, parts, strict=True)]
    return *first, *chosen, normal(H, later).sigmoid(), scale


def in_torch(
    given: Given, K: int, gelu: bool, window: Tensor | None = None, documents: Tensor | None = None
) -> Columns:
    x, weight, beta, *later = given
    assert x is not None and weight is not None and beta is not None
    keys, expected, gains, betas, scale = later
    c = None
    if betas is not None and scale is not None:
        c = Corrections(keys, expected, gains, betas, scale, "gelu" if gelu else "closed", True)
    return delta_columns(short_conv(x, weight, None, window, documents), beta, K, 1, c)


def by_kernel(
    given: Given, K: int, gelu: bool, window: Tensor | None = None, documents: Tensor | None = None
) -> Columns:
    numbers = None if documents is None else documents.int()
    options = K, K**-0.5, UNIT_EPS, gelu, True
    return Columns(*kernel.conv_columns(*given[:2], window, numbers, *given[2:], *options))


def cast(given: Given, dtype: torch.dtype) -> Given:
    return tuple(None if z is None else z.detach().to(dtype).requires_grad_() for z in given)


def gradients(columns: Columns, given: Given, d_columns: list[Tensor]) -> list[Tensor]:
    """The columns, and the gradients of what is given."""
    same = [d.to(z.dtype) for d, z in zip(d_columns, columns, strict=True)]
    return [*columns, *torch.autograd.grad(columns, [z for z in given if z is not None], same)]


def check(given: Given, K: int, gelu: bool, window: Tensor | None, documents: Tensor | None) -> None:
    exact, single = cast(given, torch.float64), cast(given, torch.float32)
    expected = in_torch(exact, K, gelu, window, documents)
    d_columns = [torch.randn_like(z) for z in expected]
    with unwritten_memory_is_nan():
        found = by_kernel(single, K, gelu, None if window is None else window.float(), documents)
        got = gradients(found, single, d_columns)
    for a, b in zip(got, gradients(expected, exact, d_columns), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@settings(max_examples=10, deadline=None)
@given(
    T=st.sampled_from([1, 3, 4, 5, 9]),
    H=st.sampled_from([1, 1, 2]),
    sizes=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    W=st.integers(2, 4),
    later=st.integers(0, 3),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    gelu=st.booleans(),
    carried=st.booleans(),
    packed=st.booleans(),
)
def test_conv_columns(
    T: int,
    H: int,
    sizes: tuple[int, int],
    W: int,
    later: int,
    parts: tuple[bool, ...],
    gelu: bool,
    carried: bool,
    packed: bool,
) -> None:
    tensors = draw(T, H, *sizes, W, later, parts)
    window = torch.randn(2, W - 1, H * (2 * sizes[0] + sizes[1]), dtype=torch.float64) if carried else None
    with short_strips(4):
        check(tensors, sizes[0], gelu, window, (torch.rand(2, T) < 0.3).cumsum(1) if packed else None)


def test_in_half_precision_it_errs_at_most_twice_what_torch_does() -> None:
    half = cast(draw(7, 1, 32, 32, 4, 2), torch.float16)
    exact = cast(half, torch.float64)
    expected = in_torch(exact, 32, False)
    d_columns = [torch.randn_like(z).half().double() for z in expected]
    wanted = gradients(expected, exact, d_columns)
    ours, theirs = (gradients(compute(half, 32, False), half, d_columns) for compute in (by_kernel, in_torch))
    for i, (a, b, reference) in enumerate(zip(ours, theirs, wanted, strict=True)):
        assert (a - reference).norm() <= 2 * (b - reference).norm(), i


def test_it_is_a_proper_operator() -> None:
    x, weight, beta, *later = cast(draw(2, 1, 16, 16, 2, 1), torch.float32)
    window, numbers = torch.randn(2, 1, 48), torch.zeros(2, 2, dtype=torch.int32)
    torch.library.opcheck(
        kernel.conv_columns.registered, (x, weight, window, numbers, beta, *later, 16, 0.25, UNIT_EPS, True, True)
    )


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let layers use the kernels; the list grows with every call of the operator."""
    calls, run = [], kernel.conv_columns

    def counted(*inputs: Any) -> Any:
        calls.append(1)
        return run(*inputs)

    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: True)
    monkeypatch.setattr(kernel, "conv_columns", counted)
    return calls


SIZES = {"key_dim": 16, "value_dim": 16}


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("prism", {}),
        pytest.param("prism", {"steps": 3, "solver": "gelu", "shared_key": True}, marks=pytest.mark.slow),
        ("prism", {"keys": "previous", "erase": "channel", "scaling": "head"}),
        ("prism", {"forget": "channel"}),
        ("gated_delta", {}),
    ],
)
def test_a_layer_with_this_operator_equals_the_layer_in_torch(
    rule: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a conv state, in packed documents and with recomputation, which changes no bit."""
    layer, x, reset = Block(rule, 32, 2, 32, **SIZES, **options).train(), torch.randn(1, 5, 32), torch.zeros(1, 5) > 0
    reset[:, 3] = True

    def results() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y, state = layer(leaf[:, :2])
        z, _ = layer(leaf[:, 2:], state.map(Tensor.detach), reset=reset[:, 2:])
        return [y, z, *torch.autograd.grad(y.square().sum() + z.square().sum(), [leaf, *layer.parameters()])]

    expected = results()
    calls = count_calls(monkeypatch)
    got = results()
    assert len(calls) == 2
    layer.recompute = True
    again = results()
    assert len(calls) == 4, "the operator does not run again"
    for a, b, wanted in zip(got, again, expected, strict=True):
        assert torch.equal(a, b)
        assert_close("layer", a, wanted, 1e-5)


def test_other_layers_keep_two_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = count_calls(monkeypatch), torch.randn(1, 3, 32)
    prism.Mixer("gated_delta", 32, 2, key_dim=12, value_dim=16)(x)
    prism.Mixer("gated_delta", 32, 2, conv_size=5, **SIZES)(x)
    prism.Mixer("delta_product", 32, 2, **SIZES)(x)
    hooked = prism.Mixer("gated_delta", 32, 2, **SIZES)
    seen: list[int] = []
    hooked.rule.get_submodule("conv").register_forward_hook(lambda *_: seen.append(1))
    hooked(x)
    assert seen and not calls
    window = torch.zeros(1, 3, 96, requires_grad=True)
    assert not one_operator_serves(torch.zeros(1, 3, 96), window, 4, 16, 16, 1)
    with torch.no_grad():
        assert one_operator_serves(torch.zeros(1, 3, 96), window, 4, 16, 16, 1)
