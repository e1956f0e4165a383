"""The kernels around the memory (solver, delta columns, short convolution) against their torch definitions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import prism
from prism.engine import layer_ops
from prism.engine.layer_ops import Columns, Corrections, delta_columns, solve, solved_writes
from prism.nn.block import Block
from prism.rules.parts import UNIT_EPS, ShortConv
from prism.rules.rule import Span
from tests.engine.kernels.where import CAN_START, needs_kernels
from tests.helpers import assert_close, relative_error, unwritten_memory_is_nan

pytestmark = needs_kernels

if CAN_START:
    from prism.engine.kernels.ops.columns import columns
    from prism.engine.kernels.ops.cross_entropy import token_losses
    from prism.engine.kernels.ops.short_conv import short_conv
    from prism.engine.kernels.ops.solver import solve as solve_by_kernel


@pytest.mark.parametrize("solver", ["gelu", "closed"])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("nonlinearity", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_solver(solver: str, gain: bool, nonlinearity: bool, scaled: bool) -> None:
    B, T, H, L, V = 1, 130, 2, 3, 20
    v, p = torch.randn(B, T, H, V), torch.randn(B, T, H, L, V) if gain else None
    u = torch.randn(B, T, H, V) if scaled == gain else None
    beta, scale = torch.rand(B, T, H, L), torch.randn(L, H, V) if scaled else None
    given = [z.requires_grad_() for z in (v, u, p, beta, scale) if z is not None]
    expected = solved_writes(v, u, p, beta, scale, solver, nonlinearity)
    with unwritten_memory_is_nan():
        got = solve_by_kernel(v, u, p, beta, scale, solver == "gelu", nonlinearity)
        d_w = torch.randn_like(got)
        gradients = torch.autograd.grad(got, given, d_w)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients, torch.autograd.grad(expected, given, d_w), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_solver_is_a_proper_operator_and_equals_its_torch_loop() -> None:
    v, u, p = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 2, 4)
    beta = torch.rand(1, 2, 1, 2)
    given = [z.requires_grad_() for z in (v, u, p, beta)]
    torch.library.opcheck(solve_by_kernel.registered, (*given, None, True, True))
    writes = beta.unsqueeze(-1) * solve(v - u, p, 2, "gelu")
    torch.testing.assert_close(solve_by_kernel(*given, None, True, True), writes, rtol=1e-5, atol=1e-6)


def draw_columns(
    T: int, H: int, K: int, V: int, later: int, own_keys: bool, anchored: bool, gains: bool
) -> tuple[Tensor | None, ...]:
    """mixed and β, and the keys, expected values, gains, β and γ of the later writes, in float64."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, T, *shape, dtype=torch.float64)

    mixed, beta = normal(H * (2 * K + V)), normal(H).sigmoid()
    if not later:
        return mixed, beta, None, None, None, None, None
    return (
        mixed,
        beta,
        normal(H, later, K) if own_keys else None,
        normal(H, V) if anchored else None,
        normal(H, later, V) if gains else None,
        normal(H, later).sigmoid(),
        torch.randn(later, H, V, dtype=torch.float64),
    )


def columns_in_torch(tensors: tuple[Tensor | None, ...], key_dim: int, solver: str, nonlinearity: bool) -> Columns:
    mixed, beta, keys, expected, gains, betas, scale = tensors
    assert mixed is not None and beta is not None
    corrections = None
    if betas is not None and scale is not None:
        corrections = Corrections(keys, expected, gains, betas, scale, solver, nonlinearity)
    return delta_columns(mixed, beta, key_dim, corrections=corrections)


def columns_by_kernel(tensors: tuple[Tensor | None, ...], key_dim: int, solver: str, nonlinearity: bool) -> Columns:
    options = (key_dim, key_dim**-0.5, UNIT_EPS, solver == "gelu", nonlinearity)
    return Columns(*columns(*tensors, *options))


@settings(max_examples=24, deadline=None)
@given(
    T=st.sampled_from([1, 5, 67]),
    H=st.integers(1, 3),
    sizes=st.sampled_from([(16, 16), (20, 36), (32, 16)]),
    later=st.integers(0, 3),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    solver=st.sampled_from(["gelu", "closed"]),
    nonlinearity=st.booleans(),
)
def test_columns(
    T: int, H: int, sizes: tuple[int, int], later: int, parts: tuple[bool, ...], solver: str, nonlinearity: bool
) -> None:
    K, V = sizes
    tensors = draw_columns(T, H, K, V, later, *parts)
    exact = [z.requires_grad_() for z in tensors if z is not None]
    expected = columns_in_torch(tensors, K, solver, nonlinearity)
    d_columns = [torch.randn_like(z) for z in expected]
    single = tuple(None if z is None else z.detach().float().requires_grad_() for z in tensors)
    with unwritten_memory_is_nan():
        got = columns_by_kernel(single, K, solver, nonlinearity)
        gradients = torch.autograd.grad(got, [z for z in single if z is not None], [z.float() for z in d_columns])
    wanted = [*expected, *torch.autograd.grad(expected, exact, d_columns)]
    for a, b in zip([*got, *gradients], wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_columns_in_half_precision_err_at_most_twice_what_torch_does() -> None:
    K = V = 32
    tensors = tuple(z.half() for z in draw_columns(40, 2, K, V, 2, True, True, True) if z is not None)
    exact = columns_in_torch(tuple(z.double() for z in tensors), K, "closed", True)
    for name in Columns._fields:
        reference = getattr(exact, name)
        ours, theirs = (
            (getattr(compute(tensors, K, "closed", True), name) - reference).norm()
            for compute in (columns_by_kernel, columns_in_torch)
        )
        assert ours <= 2 * theirs, name


def test_columns_are_a_proper_operator() -> None:
    tensors = draw_columns(3, 1, 4, 4, 1, True, True, True)
    given = tuple(None if z is None else z.float().requires_grad_() for z in tensors)
    torch.library.opcheck(columns.registered, (*given, 4, 0.5, UNIT_EPS, True, True))


@pytest.mark.parametrize("given", [(1,), (2,), (4,), (6,), (1, 6)])
def test_columns_of_which_only_some_want_a_gradient(given: tuple[int, ...]) -> None:
    tensors = draw_columns(5, 2, 16, 20, 2, True, True, True)
    exact = [z for i, z in enumerate(tensors) if z is not None and z.requires_grad_(i in given).requires_grad]
    single = tuple(None if z is None else z.detach().float().requires_grad_(z.requires_grad) for z in tensors)
    wanted = torch.autograd.grad(sum(z.sum() for z in columns_in_torch(tensors, 16, "gelu", True)), exact)
    total = sum(z.sum() for z in columns_by_kernel(single, 16, "gelu", True))
    got = torch.autograd.grad(total, [z for z in single if z is not None and z.requires_grad])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_unused_columns_have_no_gradient() -> None:
    mixed, beta, *_ = draw_columns(3, 1, 16, 16, 0, False, False, False)
    assert mixed is not None and beta is not None
    single = (mixed.float().requires_grad_(), beta.float().requires_grad_(), *[None] * 5)
    (gradient,) = torch.autograd.grad(columns_by_kernel(single, 16, "gelu", True).q.sum(), [single[0]])
    assert gradient[..., :16].any() and not gradient[..., 16:].any(), "only q was used"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("bias", "activation", "carried", "W"), [(False, True, False, 4), (True, False, True, 4), (True, True, True, 9)]
)
def test_short_convolution(packed: bool, bias: bool, activation: bool, carried: bool, W: int) -> None:
    B, T, D = 2, 70, 20
    conv = ShortConv(D, W, bias, activation).double()
    x, window = torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, W - 1, D, dtype=torch.float64)
    reset = torch.zeros(B, T, dtype=torch.bool)
    reset[:, [1, 30, 31, 65]] = True
    span = Span(reset=reset if packed else None)
    given = [x.requires_grad_(), *conv.parameters()]
    expected, _ = conv(x, window if carried else None, span)
    d_y = torch.randn_like(expected)
    single = [z.detach().float().requires_grad_() for z in given]
    with unwritten_memory_is_nan():
        before = window.float() if carried else None
        documents = span.documents.int() if span.documents is not None else None
        got = short_conv(single[0], single[1], single[2] if bias else None, before, documents, activation)
        gradients = torch.autograd.grad(got, single, d_y.float())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, torch.autograd.grad(expected, given, d_y), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_short_convolution_is_a_proper_operator() -> None:
    x, weight = torch.randn(1, 3, 16, requires_grad=True), torch.randn(2, 16, requires_grad=True)
    torch.library.opcheck(short_conv.registered, (x, weight, None, None, None, True))


def test_a_convolution_state_has_a_gradient_by_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x, window = ShortConv(16, 3), torch.randn(2, 5, 16), torch.randn(2, 2, 16)
    span = Span(reset=torch.tensor([[False] * 5, [False, True, False, False, True]]))

    def results(by_kernel: bool) -> list[Tensor]:
        monkeypatch.setattr(layer_ops, "use_kernel", lambda x: by_kernel)
        given = [x.clone().requires_grad_(), window.clone().requires_grad_(), *conv.parameters()]
        y, _ = conv(given[0], given[1], span)
        return [y, *torch.autograd.grad(y.square().sum(), given)]

    for got, wanted in zip(results(True), results(False), strict=True):
        assert_close("convolution", got, wanted, 1e-5)


@pytest.mark.parametrize("options", [{"preset": "lm"}, {"preset": "paper"}, {"preset": "lm", "steps": 1}])
def test_a_layer_on_these_kernels_equals_the_layer_in_torch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under gradient checkpointing. Gradients of a few gates are small sums of many terms: float64 judges both."""
    mixer = prism.Mixer("prism", 32, 2, **options)
    x = torch.randn(2, 9, 32)

    def gradients(again: bool, mixer: prism.Mixer = mixer, x: Tensor = x) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = checkpoint(lambda z: mixer(z)[0], leaf, use_reentrant=False) if again else mixer(leaf)[0]
        return [y, *torch.autograd.grad(y.square().sum(), [leaf, *mixer.parameters()])]

    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: False)
    expected = gradients(False)
    exact = gradients(False, copy.deepcopy(mixer).double(), x.double())
    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: True)
    for again in (False, True):
        for got, ours, wanted in zip(gradients(again), expected, exact, strict=True):
            assert_close("layer", got, wanted, max(2 * relative_error(ours, wanted), 1e-5))


@pytest.mark.parametrize("rule", ["prism", "gated_delta", "delta_product"])
def test_a_recomputing_layer_on_these_kernels_has_the_same_gradients_to_the_bit(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: True)
    layer, x, reset = Block(rule, 32, 2, 64).train(), torch.randn(1, 19, 32), torch.rand(1, 19) < 0.1
    results = []
    for layer.recompute in (False, True):
        leaf = x.clone().requires_grad_()
        y, _ = layer(leaf, reset=reset)
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("outputs", [1, 40, 5000])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_token_losses(outputs: int, z_loss: float) -> None:
    logits, targets = 3 * torch.randn(7, outputs), torch.randint(0, outputs, (7,))
    logits[3] += 100.0
    targets[2] = -7
    wanted = layer_ops.token_losses(logits.double(), targets, -7, z_loss, torch.float64)
    with unwritten_memory_is_nan():
        got = token_losses(logits, targets, -7, z_loss, torch.float32)
        rounded = token_losses(logits, targets, -7, z_loss, torch.bfloat16)[1]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rounded.float(), got[1], rtol=2**-7, atol=0.0)  # the interpreter truncates
    assert token_losses(logits, targets, -7, z_loss, None)[1] is None
    targets[0] = outputs
    assert token_losses(logits, targets, -7, z_loss, None)[0].isnan().tolist() == [True, *[False] * 6]
