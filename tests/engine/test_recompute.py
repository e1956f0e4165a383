"""Recomputed activations: the same gradients to the bit, from fewer saved tensors."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prism.engine import recompute
from prism.engine.recompute import cheap, recomputing, replaceable
from prism.nn.block import Block


def bytes_kept(run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that are alive after the forward pass, found from the graph's saved tensors without packing them again."""
    out = run()
    seen: dict[int, int] = {}
    nodes, visited = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                for one in raw if isinstance(raw, (tuple, list)) else (raw,):
                    data = getattr(one, "data", None)
                    if isinstance(data, Tensor):
                        seen[data.untyped_storage().data_ptr()] = data.untyped_storage().nbytes()
        nodes += [following for following, _ in node.next_functions]
    return sum(seen.values()), out


def block(rule: str, **options: int) -> Block:
    torch.manual_seed(0)
    return Block(rule, 32, 2, 64, **options).train()


@pytest.mark.parametrize("rule", ["prism", "gated_delta", "delta_product", "kda", "softmax"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_to_the_bit(rule: str, autocast: bool) -> None:
    plain = block(rule)
    lean = copy.deepcopy(plain)
    lean.recompute = True
    x = torch.randn(2, 70, 32)
    reset = torch.rand(2, 70) < 0.1
    results = []
    for layer in (plain, lean):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, _ = layer(given, reset=reset)
        y.square().sum().backward()
        results.append([y, given.grad, *[p.grad for p in layer.parameters()]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_columns_gates_and_norms_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept: inputs, large products, and the memory's own tensors."""
    layer, x = block("prism"), torch.randn(2, 64, 32, requires_grad=True)
    runs = []
    kept: list[int] = []
    original = recompute._Region.pack

    def counted(region: recompute._Region, z: Tensor) -> object:
        packed = original(region, z)
        runs.append(isinstance(packed, Tensor))
        return packed

    monkeypatch.setattr(recompute._Region, "pack", counted)
    for layer.recompute in (False, True):
        count, out = bytes_kept(lambda: layer(x)[0])
        kept.append(count)
        out.sum().backward()
    assert runs.count(False) >= 8  # q, k, w, both norms, the gated norm, the product …
    assert kept[1] < 0.75 * kept[0]


def test_results_are_freed_when_the_block_ends() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with recomputing():
        (y,), _ = cheap(lambda z: ((z.tanh(),), None), x)
        z = replaceable(F.linear(y, weight).sin(), torch.sin, F.linear(y, weight))
        out = F.linear(z, weight)
        held = [weakref.ref(y), weakref.ref(z)]
    del y, z
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert out.grad_fn is not None


def test_a_second_backward_pass_computes_again() -> None:
    layer, x = block("prism"), torch.randn(1, 9, 32)
    layer.recompute = True
    loss = layer(x)[0].square().sum()
    grads = [torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for _ in range(3)]
    for more in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], more, strict=True))


def test_each_function_runs_once_more_for_all_who_need_it() -> None:
    calls, weight = [], nn.Parameter(torch.randn(4, 4))

    def double(x: Tensor) -> tuple[tuple[Tensor], str]:
        calls.append(torch.is_grad_enabled())
        return (2 * F.silu(x),), "rest"

    x = torch.randn(3, 4, requires_grad=True)
    with recomputing():
        (y,), rest = cheap(double, x)
        out = F.linear(y, weight) + F.linear(y[:, :4], weight).tanh()
    assert rest == "rest" and calls == [True]
    out.sum().backward()
    assert calls == [True, True]
    own = x.grad.clone()
    x.grad = None
    y = 2 * F.silu(x)
    (F.linear(y, weight) + F.linear(y, weight).tanh()).sum().backward()
    assert torch.equal(own, x.grad)


def test_a_result_may_be_replaced_by_an_equal_function() -> None:
    x, weight, calls = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True), []

    def again(z: Tensor) -> Tensor:
        calls.append(1)
        return z.tanh()

    with recomputing():
        y = replaceable(x.tanh(), again, x)
        out = F.linear(y, weight)
    (got,) = torch.autograd.grad(out.sum(), weight)
    assert calls == [1]
    assert torch.equal(got, torch.autograd.grad(F.linear(x.tanh(), weight).sum(), weight)[0])


def test_other_hooks_and_modes_come_first() -> None:
    layer, x = block("prism"), torch.randn(1, 9, 32, requires_grad=True)
    layer.recompute = True
    expected = torch.autograd.grad(layer(x)[0].sum(), x)[0]
    again = checkpoint(lambda z: layer(z)[0], x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], expected)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(torch.autograd.grad(layer(x)[0].sum(), x)[0], expected)
    with torch.no_grad():
        layer(x)
    torch.testing.assert_close(torch.func.grad(lambda z: layer(z)[0].sum())(x.detach()), expected)


def test_a_function_must_do_the_same_every_time() -> None:
    x, calls = torch.randn(3, requires_grad=True), []

    def fickle(z: Tensor) -> tuple[tuple[Tensor], None]:
        calls.append(1)
        return (z.tanh() if len(calls) > 1 else z.tanh().tanh(),), None

    with recomputing():
        (y,), _ = cheap(fickle, x)
        out = y.square()
    with pytest.raises(RuntimeError, match="it must do the same in every call"):
        out.sum().backward()
