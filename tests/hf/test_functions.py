"""The functions with a backward of their own: values, first and second derivatives, short and odd lengths."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from prism.engine import layer_ops
from prism.hf import conv, delta, lightning, mamba2, mlstm, norms, rg_lru
from prism.hf.documents import document_numbers, document_starts
from prism.hf.families import modeling_file
from tests.engine.kernels.where import DEVICE, needs_kernels
from tests.hf.models import tiny


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("cached", [7, 2**16])
@pytest.mark.parametrize("activation", ["silu", None, "gelu"])
@pytest.mark.parametrize(("tokens", "bias"), [(1, True), (3, False), (11, True)])
def test_convolution(tokens: int, bias: bool, activation: Any, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_CACHED", cached)
    torch.manual_seed(0)
    x, weight = doubles(2, 3, tokens), doubles(3, 4)
    c = doubles(3) if bias else None
    wanted = F.conv1d(x, weight.unsqueeze(1), c, padding=3, groups=3)[..., :tokens]
    wanted = {"silu": F.silu, "gelu": F.gelu, None: lambda y: y}[activation](wanted)
    inputs = (x, weight) if c is None else (x, weight, c)
    torch.testing.assert_close(conv.causal_conv1d_fn(x, weight, c, activation), wanted)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return conv.causal_conv1d_fn(given[0], given[1], given[2] if bias else None, activation)

    assert gradcheck(run, inputs) and gradgradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_without_gradients_is_the_same(dtype: torch.dtype, activation: Any) -> None:
    """Also where channels come first in memory, and inside an autocast block, which would round the taps."""
    x, weight, bias = torch.randn(2, 5, 11).to(dtype), torch.randn(5, 4).to(dtype), torch.randn(5).to(dtype)
    wanted = conv.causal_conv1d_fn(x.requires_grad_(), weight, bias, activation).detach()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = conv.causal_conv1d_fn(x.transpose(1, 2).contiguous().transpose(1, 2), weight, bias, activation)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted)
    exact = F.conv1d(x.double(), weight.double().unsqueeze(1), bias.double(), padding=3, groups=5)[..., :11]
    exact = F.silu(exact) if activation else exact
    torch.testing.assert_close(found, exact.to(dtype))


def test_convolution_takes_gradients_with_channels_first() -> None:
    """Slicing all tokens, as OLMo-hybrid does, makes autograd pass the gradient on in this layout."""
    x, weight = torch.randn(2, 9, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    g = torch.randn(2, 5, 9)
    wanted = torch.autograd.grad(
        conv.causal_conv1d_fn(x.transpose(1, 2), weight, None, "silu"), (x, weight), g.mT.contiguous().mT
    )
    found = torch.autograd.grad(conv.causal_conv1d_fn(x.transpose(1, 2), weight, None, "silu"), (x, weight), g)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("tokens", [1, 3])
def test_convolution_after_cached_tokens(tokens: int) -> None:
    x, weight, bias = torch.randn(2, 3, 4 + tokens), torch.randn(3, 4), torch.randn(3)
    state = x[..., :4].clone()
    wanted = conv.causal_conv1d_fn(x, weight, bias, "silu")[..., 4:]
    torch.testing.assert_close(conv.causal_conv1d_update(x[..., 4:], state, weight, bias, "silu"), wanted)
    torch.testing.assert_close(state, x[..., -4:])


def test_unit_rows() -> None:
    x = doubles(2, 3, 5)
    assert gradcheck(lambda z: norms._UnitRows.apply(z, 0.5), x)
    assert gradgradcheck(lambda z: norms._UnitRows.apply(z, 0.5), x)


@pytest.mark.parametrize("cached", [7, 2**16])
def test_scaled_rows(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_SPAN", cached)
    x, y, row, head, channel = doubles(2, 3, 2, 4), doubles(2, 3, 2, 4), doubles(2, 3, 2), doubles(2), doubles(2, 4)
    assert torch.equal(norms.scaled_rows(x, row), x * row.unsqueeze(-1))
    assert gradcheck(norms.scaled_rows, (x, row)) and gradgradcheck(norms.scaled_rows, (x, row))
    for scale in (head, channel):
        wanted = y + x * (head.unsqueeze(-1) if scale is head else channel)
        torch.testing.assert_close(norms.add_scaled(y.clone(), x, scale), wanted)
        with torch.no_grad():
            torch.testing.assert_close(norms.add_scaled(y.clone(), x, scale), wanted)

        def run(*given: torch.Tensor) -> torch.Tensor:
            return norms.add_scaled(given[0] * 1, *given[1:])  # a leaf cannot be written into

        assert gradcheck(run, (y, x, scale)) and gradgradcheck(run, (y, x, scale))


@pytest.mark.parametrize("normalise", [False, True])
def test_one_cached_token_agrees_with_the_chunk_form(normalise: bool) -> None:
    given = [torch.randn(2, 1, 3, 8, requires_grad=True) for _ in range(3)]
    given += [(-torch.rand(2, 1, 3)).requires_grad_(), torch.rand(2, 1, 3, requires_grad=True)]
    state = torch.randn(2, 3, 8, 8, requires_grad=True)
    results = []
    for rule in (delta.recurrent_gated_delta_rule, delta.chunk_gated_delta_rule):
        o, end = rule(*given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=normalise)
        results.append((o, end, *torch.autograd.grad(o.sin().sum() + end.cos().sum(), [*given, state])))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_rows_that_stay_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path on a GPU rounds queries, keys and writes once: an error of the order of half precision's."""
    q, k, v = torch.randn(3, 2, 40, 4, 16).bfloat16()
    g, beta = -torch.rand(2, 40, 4), torch.rand(2, 40, 4).bfloat16()
    given = [z.requires_grad_() for z in (q, k, v, g, beta)]

    def run() -> list[torch.Tensor]:
        o, _ = delta.chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)
        assert o.dtype == torch.bfloat16
        return [o, *torch.autograd.grad(o.float().square().sum(), given)]

    wanted = run()
    monkeypatch.setattr(delta, "_half_on_gpu", lambda x: True)
    for a, b in zip(run(), wanted, strict=True):
        assert 0 < float((a - b).detach().float().norm() / b.detach().float().norm()) < 0.02


@pytest.mark.parametrize("cached", [7, 2**16])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm(gate_first: bool, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_SPAN", cached)
    given = doubles(2, 5, 6), doubles(2, 5, 6), doubles(2, 3)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return norms.gated_norm(*tensors, 1e-3, gate_first)

    wanted = norms._gated_norm(*by_groups(*given), 1e-3, gate_first).flatten(-2)
    torch.testing.assert_close(run(*given), wanted)
    with torch.no_grad():
        torch.testing.assert_close(run(*given), wanted)
    assert gradcheck(run, given) and gradgradcheck(run, given)


def by_groups(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.unflatten(-1, weight.shape), gate.unflatten(-1, weight.shape), weight


@pytest.mark.parametrize(
    ("model", "kind", "make", "settings"),
    [
        ("qwen3_5", "Qwen3_5RMSNormGated", delta.gated_norm, {}),
        ("mamba2", "MambaRMSNormGated", mamba2.gated_norm, {"group_size": 8}),
        ("nemotron_h", "NemotronHRMSNormGated", mamba2.gated_norm, {"group_size": 4}),
        ("qwen3_5", "Qwen3_5RMSNorm", norms.centred_rms_norm, {}),
        ("olmo_hybrid", "OlmoHybridRMSNorm", norms.rms_norm, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small", [1, 2**13])
def test_norms_agree_with_the_originals(
    model: str,
    kind: str,
    make: Any,
    settings: dict[str, int],
    small: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many tokens and of a few."""
    monkeypatch.setattr(norms, "_SMALL", small)
    original = getattr(import_module(modeling_file(model)), kind)
    known = inspect.signature(original).parameters  # Mamba-2's norm has groups from transformers 5.23 on
    norm = original(16, eps=1e-3, **{key: value for key, value in settings.items() if key in known}).to(dtype)
    torch.nn.init.normal_(norm.weight)
    inputs = 2 if kind.endswith("Gated") else 1
    given = [torch.randn(3, 5, 16, dtype=dtype, requires_grad=True) for _ in range(inputs)]

    def run() -> list[torch.Tensor]:
        y = norm(*given)
        return [y, *torch.autograd.grad(y.square().sum(), [*given, norm.weight])]

    wanted = run()
    monkeypatch.setattr(type(norm), "forward", make(type(norm).forward))
    found = run()
    if dtype == torch.float32:
        made = str(found[0].grad_fn.next_functions) + found[0].grad_fn.name()  # type: ignore[union-attr]
        assert ("GatedNorm" in made) == (small == 1)
        torch.testing.assert_close(found, wanted)
        with torch.no_grad():
            torch.testing.assert_close(norm(*given), wanted[0])
    else:  # transformers' own roundings
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@needs_kernels
def test_the_norm_behind_the_memory_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = import_module(modeling_file("qwen3_5")).Qwen3_5RMSNormGated(16, eps=1e-3).to(DEVICE)
    torch.nn.init.normal_(norm.weight)
    given = [torch.randn(30, 16, device=DEVICE, requires_grad=True) for _ in range(2)]

    def run() -> list[torch.Tensor]:
        y = norm(*given)
        return [y, *torch.autograd.grad(y.square().sum(), [*given, norm.weight])]

    wanted = run()
    monkeypatch.setattr(type(norm), "forward", delta.gated_norm(type(norm).forward))
    monkeypatch.setattr(layer_ops, "use_kernel", lambda x: True)
    found = run()
    assert "GatedNorm" in found[0].grad_fn.name()  # type: ignore[union-attr]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_recurrence_over_tokens() -> None:
    x, a, start = doubles(2, 5, 3), torch.rand(2, 5, 3, dtype=torch.float64, requires_grad=True), doubles(2, 3)
    assert gradcheck(rg_lru._Loop.apply, (x, a, start)) and gradgradcheck(rg_lru._Loop.apply, (x, a, start))


@pytest.mark.parametrize("position", [0, 7])
def test_one_cached_token_of_a_recurrent_unit(position: int) -> None:
    """At position 0 the state does not count, which is left to the original."""
    torch.manual_seed(0)
    layer = next(module for module in tiny("recurrent_gemma").modules() if type(module).__name__.endswith("Rglru"))
    x, state = torch.randn(2, 1, len(layer.recurrent_param)), torch.randn(2, len(layer.recurrent_param))
    original, calls = type(layer).forward, []

    def counted(*given: Any) -> Any:
        calls.append(None)
        return original(*given)

    results = []
    for forward in (original, rg_lru.unit(counted)):
        layer.recurrent_states = state.clone()
        with torch.no_grad():
            results.append((forward(layer, x, torch.full((2, 1), position)), layer.recurrent_states))
    torch.testing.assert_close(results[1], results[0])
    assert len(calls) == (position == 0)


def test_one_cached_token_of_mlstm() -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(mode="inference", chunk_size=8, eps=1e-6, return_last_states=True)
    q, k, v = torch.randn(3, 2, 3, 1, 4)
    gates, start = torch.randn(2, 2, 3, 1), (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 1))
    with torch.no_grad():
        h, last = mlstm.backend(lambda *given: ())(SimpleNamespace(config=config), q, k, v, *gates, *start)
    wanted, end = mlstm.mlstm(q, k, v, *gates, start, 1e-6)
    torch.testing.assert_close([h, *last], [wanted, *end])


@pytest.mark.parametrize("masked", [False, True])
def test_one_block_of_lightning_attention(masked: bool) -> None:
    torch.manual_seed(0)
    layer = next(module for module in tiny("minimax").modules() if type(module).__name__ == "MiniMaxLightningAttention")
    x, mask = torch.randn(2, layer.block_size - 1, 32, requires_grad=True), None
    if masked:
        mask = torch.ones(x.shape[:2])
        mask[0, :2] = 0
    results = []
    for forward in (type(layer).forward, lightning.lightning_attention(lambda *given: ())):
        o, end = forward(layer, x, None, mask)[:2]
        results.append([o, end, *torch.autograd.grad(o.square().sum() + end.square().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(("tokens", "theirs"), [(1, True), (8, True), (16, True), (9, False), (24, False)])
def test_short_sequences_of_mlstm_stay_with_the_original(tokens: int, theirs: bool) -> None:
    def original(self: Any, query: torch.Tensor, *more: Any) -> str:
        return "theirs"

    config = SimpleNamespace(mode="train", chunk_size=8, eps=1e-6, return_last_states=False)
    q, gates = torch.randn(1, 2, tokens, 4), torch.randn(1, 2, tokens)
    found = mlstm.backend(original)(SimpleNamespace(config=config), q, q, q, gates, gates)
    assert found == "theirs" if theirs else found.shape == q.shape


def test_a_state_update_with_a_decay_per_number() -> None:
    """A and dt that are not the same for all channels of a head, as mamba_ssm allows."""
    state, x, dt = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3), torch.rand(2, 4, 3)
    A, B, C, D = -torch.rand(4, 3, 5), torch.randn(2, 2, 5), torch.randn(2, 2, 5), torch.randn(4, 3)
    wide_B, wide_C = (part.repeat_interleave(2, 1)[:, :, None] for part in (B, C))
    new = state * (dt[..., None] * A).exp() + dt[..., None] * wide_B * x[..., None]
    wanted = (new * wide_C).sum(-1) + D * x
    torch.testing.assert_close(mamba2.selective_state_update(state, x, dt, A, B, C, D), wanted)
    torch.testing.assert_close(state, new)


def test_documents_from_numbers_and_offsets() -> None:
    offsets = torch.tensor([0, 2, 3, 6])
    numbers = torch.tensor([[0, 0, 1], [2, 2, 2]])
    assert torch.equal(document_numbers(2, 3, cu_seqlens=offsets), numbers)
    assert torch.equal(document_starts(numbers), torch.tensor([[False, False, True], [False, False, False]]))
    after_cached = document_numbers(1, 5, seq_idx=torch.tensor([[4, 4, 5]]))
    assert torch.equal(after_cached, torch.tensor([[4, 4, 4, 4, 5]]))
    assert document_numbers(1, 3) is None and document_starts(None) is None
