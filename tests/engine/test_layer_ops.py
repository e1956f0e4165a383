"""The pieces of a layer: what the kernels compute and keep equals torch's definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import layer_ops
from prism.nn.mixer import Mixer
from prism.rules import delta
from prism.rules.parts.norms import HeadNorm, gated_output
from tests.engine.kernels.where import DEVICE, needs_kernels
from tests.helpers import unwritten_memory_is_nan

pytestmark = needs_kernels


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: x.dtype != torch.float64)


def both(call: Any, given: list[Tensor], modules: list[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of float32 inputs by the kernels, and of float64 ones by torch."""
    results = []
    for dtype in (torch.float32, torch.float64):
        for m in modules:
            m.to(DEVICE, dtype)
        own = [z.detach().to(DEVICE, dtype).requires_grad_() for z in given]
        weights = [p for m in modules for p in m.parameters()]
        with unwritten_memory_is_nan():
            out = call(*own)
            out = list(out) if isinstance(out, tuple) else [out]
            torch.manual_seed(9)
            grads = [torch.randn(z.shape, dtype=torch.float64).to(z) for z in out]
            found = torch.autograd.grad(out, [*own, *weights], grads)
        results.append([*out, *found])
    return results[0], results[1]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 2500])
@pytest.mark.parametrize("added", [True, False])
def test_residual_norm(by_kernels: None, rows: int, added: bool) -> None:
    norm = nn.RMSNorm(20, eps=1e-5)
    nn.init.normal_(norm.weight)
    given = [torch.randn(1, rows, 20) for _ in range(1 + added)]
    assert_equal(*both(lambda x, *delta: layer_ops.residual_norm(x, *(delta or (None,)), norm), given, [norm]))


def test_residual_sum(by_kernels: None) -> None:
    x, delta = torch.randn(2, 30, 20, device=DEVICE), torch.randn(2, 30, 20, device=DEVICE).bfloat16()
    x.requires_grad_()
    delta.requires_grad_()
    with unwritten_memory_is_nan():
        s = layer_ops.residual_sum(x, delta)
    assert "ResidualSum" in s.grad_fn.name() and s.dtype == torch.float32  # type: ignore[union-attr]
    torch.testing.assert_close(s, x + delta, rtol=0, atol=0)
    d_s = torch.randn_like(s)
    found = torch.autograd.grad(s, [x, delta], d_s)
    torch.testing.assert_close(found, (d_s, d_s.bfloat16()), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_swiglu(by_kernels: None, shape: tuple[int, int]) -> None:
    maps = [nn.Linear(12, 1030, bias=False), nn.Linear(12, 1030, bias=False), nn.Linear(1030, 12, bias=False)]
    assert_equal(*both(lambda x: layer_ops.swiglu(x, *maps), [torch.randn(*shape, 12)], maps))


@pytest.mark.parametrize("by", ["silu", "sigmoid"])
@pytest.mark.parametrize("tokens", [1, 130])
def test_gated_output(by_kernels: None, tokens: int, by: str) -> None:
    norm, out = HeadNorm(20), nn.Linear(40, 8, bias=False)
    nn.init.normal_(norm.norm.weight)
    given = [torch.randn(2, tokens, 2, 20), torch.randn(2, tokens, 40)]
    assert_equal(*both(lambda o, g: gated_output(norm, o, g, out, by), given, [norm, out]))


@pytest.mark.parametrize("rows", [(1,), (3, 130)])
def test_gated_norm(by_kernels: None, rows: tuple[int, ...]) -> None:
    norm = nn.RMSNorm(20, eps=1e-3)
    nn.init.normal_(norm.weight)

    def call(o: Tensor, g: Tensor) -> Tensor:
        if layer_ops.gated_norm_serves(o, g, norm.weight):
            return layer_ops.gated_norm(o, g, norm.weight, 1e-3)
        return norm(o) * F.silu(g)

    got, wanted = both(call, [torch.randn(*rows, 20), torch.randn(*rows, 20)], [norm])
    assert "GatedNorm" in got[0].grad_fn.name()  # type: ignore[union-attr]
    assert_equal(got, wanted)


@pytest.mark.parametrize("documents", [None, [[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]]])
@pytest.mark.parametrize("others_read", [True, False])
def test_products_and_a_convolution(by_kernels: None, documents: list[list[int]] | None, others_read: bool) -> None:
    """The sum of all gradients of x starts with the convolution's."""
    maps, taps = [nn.Linear(12, size, bias=False) for size in (30, 8)], nn.Linear(12, 4, bias=False)
    window = torch.randn(2, 3, 12)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        numbers = None if documents is None else torch.tensor(documents, device=DEVICE, dtype=torch.int32)
        conv = layer_ops.Convolution(taps.weight, window.to(x), numbers)
        found, same, convolved = layer_ops.products(x, *(m.weight for m in maps), conv=conv)
        assert convolved is not None
        return *found, convolved, *([same.square()] if others_read else [])

    assert_equal(*both(call, [torch.randn(2, 5, 12)], [*maps, taps]))


def test_products(by_kernels: None) -> None:
    maps = [nn.Linear(12, size, bias=False) for size in (30, 8, 1)]

    def call(x: Tensor) -> tuple[Tensor, ...]:
        """The products, and other readers of x: their gradients are part of the sum, and must not be changed by it."""
        found, same, _ = layer_ops.products(x, *(m.weight for m in maps))
        return *found, same.square(), same.view_as(same)

    assert_equal(*both(call, [torch.randn(2, 5, 12)], maps))
    x = torch.randn(3, 12, device=DEVICE, requires_grad=True)
    (first, second, _), same, _ = layer_ops.products(x, *(m.float().weight for m in maps))
    assert first.grad_fn is second.grad_fn is same.grad_fn
    given = torch.randn_like(x)
    before = given.clone()
    total = torch.autograd.grad([first, same], x, [torch.ones_like(first), given], retain_graph=True)[0]
    assert torch.equal(given, before)
    torch.testing.assert_close(total, given + maps[0].weight.sum(0))
    found = torch.autograd.grad(second.sum(), [x, maps[1].weight, maps[0].weight], allow_unused=True)
    assert found[2] is None  # an output that nothing reads costs no product
    torch.testing.assert_close(found[0], maps[1].weight.sum(0).expand_as(x))


@pytest.mark.parametrize("spare", [0, 3])
def test_widened(by_kernels: None, spare: int) -> None:
    ups = [nn.Linear(4, 70, bias=False), nn.Linear(6, 9, bias=False)]

    def call(y: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer_ops.widened(y, [4, 2, 6], [ups[0].weight, None, ups[1].weight]))

    assert_equal(*both(call, [torch.randn(2, 25, 12 + spare)], ups))
    y = torch.randn(3, 12 + spare, device=DEVICE, requires_grad=True)
    first, middle, _ = call(y)
    assert first.grad_fn is middle.grad_fn
    with unwritten_memory_is_nan():  # parts that nothing reads have no gradient
        found = torch.autograd.grad(middle.sum(), y)[0]
    torch.testing.assert_close(found, F.pad(torch.ones(3, 2), (4, 6 + spare)).to(DEVICE))


def test_products_of_frozen_maps_have_the_gradient_of_their_input_only(by_kernels: None) -> None:
    maps = [nn.Linear(4, 6, bias=False, device=DEVICE).requires_grad_(frozen) for frozen in (False, True)]
    x = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    sum(y.sum() for y in layer_ops.products(x, *(m.weight for m in maps))[0]).backward()  # type: ignore[union-attr]
    assert x.grad is not None and maps[0].weight.grad is None and maps[1].weight.grad is not None
    torch.testing.assert_close(x.grad, sum(m.weight.sum(0) for m in maps).expand_as(x))  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", ["prism", "gated_delta", "kda", "delta"])
def test_a_layer_whose_maps_share_the_gradient_of_their_input(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of a mixer, and with a hook on one map, which is then called."""
    torch.manual_seed(0)
    mixer, x = Mixer(rule, 32, 2, key_dim=16, value_dim=16).to(DEVICE), torch.randn(2, 20, 32, device=DEVICE)
    counted = []
    from prism.engine import layer_ops_cuda  # imports Triton

    apply = layer_ops_cuda.Products.apply

    def watched(x: Tensor, taps: Tensor | None, *given: Any) -> Any:
        counted.append((taps is not None, len(given) - 2))
        return apply(x, taps, *given)

    monkeypatch.setattr(layer_ops_cuda.Products, "apply", watched)

    def run() -> list[Tensor]:
        own = x.clone().requires_grad_()
        y = mixer(own)[0]
        return [y, *torch.autograd.grad(y.square().sum(), [own, *mixer.parameters()])]

    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: False)
    plain = run()
    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: True)
    monkeypatch.setattr(delta, "one_operator_serves", lambda *_: True)
    assert_equal(run(), [z.double() for z in plain])
    assert counted == [(rule == "prism", 2 if rule == "delta" else 3)]  # PRISM's anchor is part of the sum
    mixer.rule.qkv.register_forward_hook(lambda module, given, answer: None)
    assert_equal(run(), [z.double() for z in plain])
    assert len(counted) == 1


@pytest.mark.parametrize("piece", ["residual_norm", "swiglu", "gated_output", "products", "widened"])
def test_half_precision_errs_at_most_twice_what_torch_does(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    norm, head = nn.RMSNorm(32, eps=1e-5), HeadNorm(16)
    maps = [nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)]
    out = nn.Linear(32, 8, bias=False)
    calls: dict[str, tuple[Any, list[tuple[int, ...]], list[nn.Module]]] = {
        "residual_norm": (lambda x, d: layer_ops.residual_norm(x, d, norm), [(2, 40, 32), (2, 40, 32)], [norm]),
        "swiglu": (lambda x: layer_ops.swiglu(x, *maps), [(2, 40, 32)], maps),
        "gated_output": (lambda o, g: gated_output(head, o, g, out), [(2, 40, 2, 16), (2, 40, 32)], [head, out]),
        "products": (lambda x: tuple(layer_ops.products(x, *(m.weight for m in maps[:2]))[0]), [(2, 40, 32)], maps[:2]),
        "widened": (lambda y: tuple(layer_ops.widened(y, [32], [maps[0].weight])), [(2, 90, 40)], maps[:1]),
    }
    call, shapes, modules = calls[piece]
    given = [torch.randn(shape) for shape in shapes]
    results = []
    for dtype, kernels in ((torch.float64, False), (torch.float16, True), (torch.float16, False)):
        monkeypatch.setattr(layer_ops, "use_kernel", lambda x, kernels=kernels: kernels)
        for m in modules:
            m.to(DEVICE, torch.float16).to(dtype)
        own = [z.to(DEVICE, torch.float16).to(dtype).requires_grad_() for z in given]
        found = call(*own)
        found = list(found) if isinstance(found, tuple) else [found]
        torch.manual_seed(9)
        grads = [torch.randn(z.shape).half().to(z) for z in found]
        weights = [p for m in modules for p in m.parameters()]
        results.append([*found, *torch.autograd.grad(found, [*own, *weights], grads)])
    for exact, ours, theirs in zip(*results, strict=True):
        assert (ours.double() - exact).norm() <= 2 * (theirs.double() - exact).norm() + 1e-4 * exact.norm()


def test_one_norm_keeps_its_sum_and_nothing_else(by_kernels: None) -> None:
    """Under autocast the sum is float32, what the maps read is half precision, and delta's gradient has delta's dtype."""
    norm, kept = nn.RMSNorm(16, eps=1e-5).to(DEVICE), []
    x, delta = torch.randn(3, 16, device=DEVICE), torch.randn(3, 16, device=DEVICE).bfloat16().requires_grad_()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda z: kept.append(tuple(z.shape)) or z, lambda z: z),
        torch.autocast(DEVICE, torch.bfloat16),
    ):
        s, y = layer_ops.residual_norm(x, delta, norm)
    assert (s.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    assert sorted(kept) == [(3, 16), (16,)]
    assert torch.autograd.grad(y.float().sum() + s.sum(), delta)[0].dtype == torch.bfloat16


def test_modules_that_were_changed_are_called(by_kernels: None) -> None:
    maps = [nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)]
    maps = [m.to(DEVICE) for m in maps]
    x = torch.randn(2, 4, device=DEVICE)
    maps[1].register_forward_hook(lambda m, inputs, out: 2 * out)
    expected = F.linear(F.silu(maps[0](x)) * maps[1](x), maps[2].weight)
    torch.testing.assert_close(layer_ops.swiglu(x, *maps), expected)
    norm = nn.RMSNorm(4).to(DEVICE)  # without an epsilon of its own
    torch.testing.assert_close(layer_ops.residual_norm(x, None, norm)[1], norm(x))


def test_there_are_no_second_derivatives(by_kernels: None) -> None:
    x, norm = torch.randn(2, 4, device=DEVICE, requires_grad=True), nn.RMSNorm(4, eps=1e-5).to(DEVICE)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(layer_ops.residual_norm(x, None, norm)[1].sum(), x, create_graph=True)
