"""Layers computed in segments and spans on a CPU: as the originals compute them, also behind LoRA, hooks and others."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import prism
from prism.engine.linear import chunks
from prism.engine.linear.chunks import Kind
from prism.hf import delta_layer, delta_segments, linear_maps, rotary
from prism.hf.families import modeling_file
from prism.hf.linear_maps import is_linear, is_plain
from tests.hf.comparing import assert_near, called, doubles
from tests.hf.models import tiny, torch_functions

DELTA = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]
MLPS = [("qwen3_next", "Qwen3NextMLP"), ("qwen3_5", "Qwen3_5MLP"), ("olmo_hybrid", "OlmoHybridMLP")]
MLPS += [("qwen3_5_moe", "Qwen3_5MoeMLP"), ("bamba", "BambaMLP"), ("falcon_h1", "FalconH1MLP")]

MAPS = {"mamba2": 4, "bamba": 10, "falcon_h1": 16, "granitemoehybrid": 10, "nemotron_h": 6, "zamba2": 12}
MAPS |= {"minimax": 7, "xlstm": 16}
"""Products of each family's small model in a forward pass that `linear_maps` computes."""


@pytest.fixture(autouse=True)
def _originals_afterwards() -> Any:
    yield
    prism.restore()


def layer_of(name: str, accelerate: bool = True) -> Any:
    model = tiny(name)
    if accelerate:
        prism.accelerate(model, quiet=True)
    return next(module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet"))


def results(layer: Any, x: Tensor, **more: Any) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    y = layer(x, **more)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("cached", [2**18, 2**11])
@pytest.mark.parametrize("name", DELTA)
def test_delta_layers_agree_with_the_originals(name: str, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one segment and in several, the last of them short, with left padding and without."""
    monkeypatch.setattr(chunks, "CACHED", cached)
    torch.manual_seed(0)
    x = torch.randn(2, 171, 32, requires_grad=True)
    mask = torch.ones(2, 171, dtype=torch.long)
    mask[0, :40] = 0
    calls = called(monkeypatch, delta_layer, "gated_delta_layer")
    for more in ({}, {"attention_mask": mask}):
        with torch_functions(name):
            wanted = results(layer_of(name, accelerate=False), x, **more)
        layer = layer_of(name)
        assert_near(results(layer, x, **more), wanted)
        with torch.no_grad():
            assert_near([layer(x, **more)], wanted[:1])
    assert len(calls) == 4


def test_delta_layers_with_documents_or_overflow_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, layer = called(monkeypatch, delta_layer, "gated_delta_layer"), layer_of("qwen3_5")
    x, numbers = torch.randn(1, 150, 32), torch.arange(150)[None] // 60
    parts = torch.cat([layer(part) for part in x.split([60, 60, 30], 1)], 1)
    assert_near([layer(x, seq_idx=numbers).detach()], [parts.detach()])
    with torch.no_grad():
        layer.dt_bias[0] = torch.inf  # this head forgets everything at once
        assert bool(layer(x).isfinite().all())
        layer.dt_bias[0] = torch.nan
        assert bool(layer(x).isnan().any())
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert calls == []


def test_adapters_hear_the_memory_of_accelerated_layers() -> None:
    """They pass a function on through the layer, which only the memory function calls."""
    compat = pytest.importorskip("prism.hf.adapters.compat")
    prism.accelerate(quiet=True)
    layer, heard = layer_of("qwen3_5", accelerate=False), []

    def branches(o: Tensor, *given: Any, **more: Any) -> Tensor:
        heard.append(o.shape[1])
        return o

    with pytest.MonkeyPatch.context() as patch:
        for name in compat.MEMORY_FUNCTIONS:  # put back what `listen` replaces
            patch.setattr(compat.module_of(layer), name, getattr(compat.module_of(layer), name))
        compat.listen(layer)
        layer(torch.randn(1, 150, 32), **{compat.PASSED_ON: branches})
    assert heard == [150]


def test_delta_layers_compile_without_a_break() -> None:
    layer, x = layer_of("qwen3_5"), torch.randn(1, 150, 32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_near(results(compiled, x), results(layer, x))


def split_in_four(sources: Any) -> Any:
    """Two key heads, each beside its values and gates, as in Qwen3-Next."""
    *parts, gate = sources[0].unflatten(2, (2, -1)).split([3, 3, 4, 4], -1)
    return parts, gate


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_gradients_of_a_delta_layer(strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key heads for four value heads, a bias, and three segments of which the last is short."""
    torch.manual_seed(0)
    monkeypatch.setattr(delta_segments, "_kind", lambda *given: (Kind(2, 4, False, False), 4))
    sizes = delta_segments.Sizes(split_in_four, heads=2, key=3, eps=1e-3)
    every_entry = strength == 2.0  # by itself, in one row; in two rows along random directions
    B = 1 if every_entry else 2
    given = doubles(B, 10, 28), doubles(20, 4), doubles(20), doubles(2), doubles(B, 10, 4), doubles(B, 10, 4)

    def run(source: Tensor, taps: Tensor, bias: Tensor, norm: Tensor, a: Tensor, b: Tensor) -> Tensor:
        weights = delta_segments.Weights(taps, bias, norm)
        return delta_segments.gated_delta_layer(sizes, [source], weights, -F.softplus(a), b.sigmoid() * strength)

    weights = delta_segments.Weights(*given[1:4])
    gates = -F.softplus(given[4]), given[5].sigmoid() * strength
    torch.testing.assert_close(
        run(*given), delta_segments.in_steps(sizes, given[:1], weights, *gates), rtol=1e-5, atol=1e-5
    )
    assert gradcheck(run, given, fast_mode=not every_entry)
    assert gradgradcheck(run, given, nondet_tol=1e-12, fast_mode=True)


@pytest.mark.parametrize(("model", "kind"), MLPS)
@pytest.mark.parametrize("span", [2**9, 2**19])
def test_mlps_agree_with_the_originals(model: str, kind: str, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_maps, "_SPAN", span)
    calls = called(monkeypatch, linear_maps, "swiglu")
    file = import_module(modeling_file(model))
    config = tiny(model).config
    layer = getattr(file, kind)(*((config, 48) if model in ("qwen3_5", "qwen3_5_moe") else (config,)))
    x = torch.randn(2, 150, 32, requires_grad=True)
    wanted = results(layer, x)
    layer.forward = linear_maps.mlp(type(layer).forward).__get__(layer)
    assert_near(results(layer, x), wanted)
    with torch.no_grad():
        assert_near([layer(x)], wanted[:1])
    layer.gate_proj.weight.requires_grad_(False)
    y = layer(x)
    assert_near([*torch.autograd.grad(y.square().sum(), layer.down_proj.weight)], wanted[-1:])
    assert len(calls) == 3


def test_gradients_of_an_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_maps, "_SPAN", 8)
    given = doubles(2, 3, 2), doubles(3, 2), doubles(3, 2), doubles(4, 3)
    x, gate, up, down = given
    torch.testing.assert_close(linear_maps.swiglu(*given), (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t())
    assert gradcheck(linear_maps.swiglu, given) and gradgradcheck(linear_maps.swiglu, given)


def test_gradients_of_stacked_maps() -> None:
    given = doubles(2, 3, 4), doubles(2, 4), doubles(3, 4), doubles(1, 4)

    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return linear_maps.stacked(x, weights[:2], weights[2:])

    x, *weights = given
    for y, weight in zip(run(*given), (torch.cat(weights[:2]), weights[2]), strict=True):
        torch.testing.assert_close(y, x @ weight.t())
    assert gradcheck(run, given) and gradgradcheck(run, given)
    given[0].requires_grad_(False)
    run(*given)[1].sum().backward()
    assert given[3].grad is not None


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("how", ["hook", "half of the weights frozen"])
def test_layers_whose_maps_cannot_be_stacked(name: str, how: str) -> None:
    torch.manual_seed(0)
    layer, x = layer_of(name), torch.randn(1, 300, 32, requires_grad=True)
    wanted = results(layer, x)
    first = next(module for module in layer.modules() if type(module) is nn.Linear)
    if how == "hook":
        first.register_forward_hook(lambda module, given, y: y.clone())
        assert_near(results(layer, x), wanted)
    else:
        first.weight.requires_grad_(False)
        y = layer(x)
        assert_near([*torch.autograd.grad(y.square().sum(), [x])], wanted[1:2])


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("width", [4, 8])
def test_rotations_agree_with_the_originals(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all channels and, but for OLMo-hybrid, of some."""
    if name == "olmo_hybrid" and width < 8:
        pytest.skip("it rotates all channels")
    q, k = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(2))
    cos, sin = torch.randn(2, 2, 5, width)
    results = []
    for small, cached, rotate in (
        (0, 1, import_module(modeling_file(name)).apply_rotary_pos_emb),
        (0, 2 * q.numel() // 5, rotary.apply_rotary_pos_emb),  # spans of two tokens
        (0, 2**17, rotary.apply_rotary_pos_emb),
        (1000, 1, rotary.apply_rotary_pos_emb),
    ):
        monkeypatch.setattr(rotary, "_SMALL", small)
        monkeypatch.setattr(rotary, "_CACHED", cached)
        y = rotate(q, k, cos, sin)
        results.append([*y, *torch.autograd.grad(y[0].square().sum() + y[1].sin().sum(), (q, k))])
    for found in results[1:]:
        assert_near(found, results[0])
    heads_last = [x.transpose(1, 2) for x in (q, k)]
    for found, y in zip(rotary.apply_rotary_pos_emb(*heads_last, cos, sin, unsqueeze_dim=2), results[0], strict=False):
        assert_near([found.transpose(1, 2)], [y])
    half = [x.detach().bfloat16() for x in (q, k, cos, sin)]
    wanted = import_module(modeling_file(name)).apply_rotary_pos_emb(*half)
    assert all(torch.equal(a, b) for a, b in zip(rotary.apply_rotary_pos_emb(*half), wanted, strict=True))


def test_gradients_of_a_rotation() -> None:
    cos, sin = torch.randn(2, 2, 1, 3, 4, dtype=torch.float64)
    assert gradcheck(lambda x: rotary._Rotated.apply(x, cos, sin), doubles(2, 2, 3, 6))
    assert gradgradcheck(lambda x: rotary._Rotated.apply(x, cos, sin).square(), doubles(2, 2, 3, 6))


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_runs_with_our_maps(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called(monkeypatch, linear_maps, "linear")
    model, tokens = tiny(name), torch.randint(2, 60, (1, 300))
    model.set_attn_implementation(implementation)
    layer = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    with torch_functions(name):
        wanted = [model(tokens, labels=tokens).loss]
    wanted += torch.autograd.grad(wanted[0], list(layer.parameters()))
    prism.accelerate(model, quiet=True)
    calls.clear()
    found = [model(tokens, labels=tokens).loss]
    assert len(calls) == 4
    assert_near([*found, *torch.autograd.grad(found[0], list(layer.parameters()))], wanted)
    layer.o_proj.register_forward_hook(lambda module, given, y: 0 * y)
    assert not torch.equal(model(tokens, labels=tokens).loss, found[0])


@pytest.fixture
def two_threads() -> Any:
    """With several threads torch convolves by oneDNN."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("name", "count"), MAPS.items())
def test_other_families_run_with_our_maps(
    name: str, count: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = called(monkeypatch, linear_maps, "times")
    model, tokens = tiny(name), torch.randint(2, 60, (1, 300))
    parameters = [each for each in model.parameters() if each.requires_grad]

    def found() -> list[Tensor]:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        return [loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)]

    with torch_functions(name):
        wanted = found()
    prism.accelerate(None if everywhere else model, quiet=True)
    calls.clear()
    assert_near(found(), wanted)
    assert len(calls) == count


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_linear_maps(threads: int) -> None:
    torch.set_num_threads(threads)
    module, x = nn.Linear(24, 40, bias=False), torch.randn(2, 200, 24, requires_grad=True)
    wanted = results(module, x)
    y = linear_maps.linear(module, x)
    assert "_Linear" in y.grad_fn.name()  # type: ignore[union-attr]
    assert_near([y, *torch.autograd.grad(y.square().sum(), [x, module.weight])], wanted)
    with torch.no_grad():
        assert_near([linear_maps.linear(module, x)], wanted[:1])
    module.weight.requires_grad_(False)
    y = linear_maps.linear(module, x)
    assert_near([y, *torch.autograd.grad(y.square().sum(), [x])], wanted[:2])
    given = doubles(5, 3), doubles(2, 3)
    assert gradcheck(linear_maps._Linear.apply, given) and gradgradcheck(linear_maps._Linear.apply, given)


class Doubled(nn.Linear):
    """A map that its class has changed, as LoRA and quantisation do."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def changed_maps() -> dict[str, nn.Module]:
    maps: dict[str, nn.Module] = {key: nn.Linear(8, 8, bias=False) for key in ("hook", "instance", "half")}
    maps["hook"].register_forward_hook(lambda module, given, y: 2 * y)
    maps["instance"].forward = lambda x: 2 * x  # type: ignore[method-assign]
    maps["half"].bfloat16()
    return maps | {"class": Doubled(8, 8, bias=False), "bias": nn.Linear(8, 8)}


@pytest.mark.parametrize("how", list(changed_maps()))
def test_maps_that_are_more_than_a_weight_are_called(how: str) -> None:
    module = changed_maps()[how]
    assert not is_linear(module)
    x = torch.randn(300, 8, dtype=torch.bfloat16 if how == "half" else torch.float32)
    assert torch.equal(linear_maps.linear(module, x), module(x))


def test_hooks_of_all_modules_are_seen() -> None:
    module = nn.Linear(8, 8, bias=False)
    assert is_plain(module)
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert not is_plain(module)
    handle.remove()
    assert is_plain(module)


def test_autocast_chooses_the_precision_of_maps() -> None:
    module, x = nn.Linear(8, 8, bias=False), torch.randn(300, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_maps.linear(module, x).dtype == torch.bfloat16
