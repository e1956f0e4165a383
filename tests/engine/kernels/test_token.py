"""A layer's and a model's token in a few kernels against its ordinary forward pass, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from prism import rules
from prism.engine import cuda_graph, token, using
from prism.models import PrismCache
from prism.models.decode import Captured
from prism.nn.block import Block
from prism.nn.state import State
from prism.rules.delta import GatedDelta
from tests.engine.kernels.where import CAN_START, DEVICE, needs_kernels
from tests.helpers import assert_all_close, examples, relative_error, unwritten_memory_is_nan
from tests.models.stacks import model, tokens

pytestmark = needs_kernels

if CAN_START:
    from prism.engine.kernels.token import layer_memory as token_memory

LAYERS = {
    "prism": {},
    "prism, gelu": {"steps": 3, "solver": "gelu"},
    "prism, ablated": {"steps": 3, "shared_key": True, "gain": False, "residual": "value", "nonlinearity": False},
    "prism, gelu without gain": {
        "steps": 2,
        "solver": "gelu",
        "gain": False,
        "negative_eigenvalues": True,
        "gate": False,
    },
    "prism, decay per channel": {"forget": "channel", "gate_by": "sigmoid", "steps": 3, "key_dim": 9},
    "prism, one write": {"steps": 1, "conv_size": 2},
    "prism, no convolution": {"conv_size": 1},
    "gated_delta": {"key_dim": 20, "value_dim": 12},
    "delta": {"negative_eigenvalues": True},
    "kda": {"negative_eigenvalues": True},
    "kda, bounded": {"lower_bound": -5.0, "key_dim": 9, "value_dim": 20},
    "delta_product": {"householders": 3, "forget_gate": True, "gate": True},
}
PROMPT, STEPS = 4, 2
"""Tokens of a test: a prompt, then single ones. Triton's interpreter is slow."""


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one entry for every layer that is computed by the kernels."""
    seen: list[Any] = []

    def step(*given: Any) -> Any:
        seen.append(given)
        return original(*given)

    original = token.delta_by_kernels
    monkeypatch.setattr(token, "delta_by_kernels", step)
    return seen


def block(name: str, dtype: torch.dtype, width: int = 24, hidden: int = 40, **options: Any) -> tuple[Block, Block]:
    """A layer with random weights everywhere, and the same layer in float64."""
    torch.manual_seed(0)
    built = (
        Block(name.split(",")[0], width, 2, hidden, **{**LAYERS.get(name, {}), **options}).eval().requires_grad_(False)
    )
    for parameter in built.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.ndim < 2 else 0.1)
    built = built.to(dtype)
    exact = copy.deepcopy(built).double()
    exact.load_state_dict(built.state_dict())
    return built, exact


def run(layer: Block, x: Tensor, state: State, backend: str = "auto", overwrite: bool = False) -> dict[str, Tensor]:
    """Outputs of x `[B, T, D]`, token by token, and the last state; with backend="torch" by the forward pass."""
    outputs = []
    with torch.no_grad(), using(backend=backend):
        for row in x.unbind(1):
            if backend == "torch":
                y, state = layer(row.unsqueeze(1), state)
                outputs.append(y.squeeze(1))
            else:
                y, state = layer.decode(row, replace(state, overwrite=overwrite))
                outputs.append(y)
    return {"y": torch.stack(outputs, 1), **state.tensors()}


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == exact.keys()
    return {name: relative_error(got[name], exact[name]) for name in exact}


def assert_at_most_twice_torch(name: str, dtype: torch.dtype, rows: int = 2, **options: Any) -> None:
    layer, exact = block(name, dtype, **options)
    x = torch.randn(rows, PROMPT + STEPS, layer.mixer.rule.width).to(dtype)
    x, later = x.split([PROMPT, STEPS], 1)
    with torch.no_grad(), using(backend="torch"):
        start = layer(x)[1].map(lambda z: z.contiguous())
        reference = run(exact, later.double(), start.map(Tensor.double))
        torch_errors = errors(run(layer, later, start), reference)
    with unwritten_memory_is_nan():
        got = run(layer, later, start, "triton")
    for key, error in errors(got, reference).items():
        least = 4 * torch.finfo(dtype).eps  # torch is lucky at times; a GPU's quick exponential is right to 2
        assert error <= max(2 * torch_errors[key], least), f"{name} {key}: {error:.2e}, torch {torch_errors[key]:.2e}"


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str, stepped: list[Any]) -> None:
    assert_at_most_twice_torch(name, torch.float32)
    assert len(stepped) == STEPS


def test_every_rule_with_weights_by_role_is_tested() -> None:
    described = {name for name in rules.names() if rules.get(name).build(16, 2).current_decoding_weights() is not None}
    assert described == {name.split(",")[0] for name in LAYERS}


@pytest.mark.parametrize("name", ["prism, gelu", "gated_delta", "kda"])
def test_a_layer_in_half_precision(name: str) -> None:
    assert_at_most_twice_torch(name, torch.float16)


def test_states_are_overwritten_on_request() -> None:
    layer, _ = block("prism", torch.float32)
    x = torch.randn(2, 5, 24)
    with torch.no_grad(), using(backend="torch"):
        state = layer(x)[1].map(torch.clone)
    before = state.map(torch.clone).tensors()
    got = run(layer, x[:, :1], state, "triton")
    assert all(torch.equal(z, before[key]) for key, z in state.tensors().items())
    in_place = run(layer, x[:, :1], state, "triton", overwrite=True)
    assert all(torch.equal(in_place[key], got[key]) for key in got)
    assert all(z.data_ptr() == in_place[key].data_ptr() for key, z in state.tensors().items())


def test_a_state_of_other_strides_is_not_lost() -> None:
    """It is copied for the kernels, so it cannot be overwritten."""
    layer, _ = block("prism", torch.float32)
    x = torch.randn(2, 5, 24)
    with torch.no_grad(), using(backend="torch"):
        state = layer(x)[1].map(lambda z: z.mT.contiguous().mT)
    assert not all(z.is_contiguous() for z in state.tensors().values())
    got = run(layer, x[:, :1], state, "triton", overwrite=True)
    assert_all_close("state", got, run(layer, x[:, :1], state, "torch"), 1e-5, {})


@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 40), st.integers(5, 40), st.sampled_from([0, 9, 70]))
@examples(2)
def test_any_sizes(rows: int, key_dim: int, value_dim: int, width: int, hidden: int) -> None:
    sizes = {"key_dim": key_dim, "value_dim": value_dim, "width": width, "hidden": hidden}
    assert_at_most_twice_torch("prism", torch.float32, rows, rank=3, **sizes)


def test_values_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_memory, "ELEMENTS", 256)
    assert_at_most_twice_torch("prism", torch.float32, key_dim=16, value_dim=40)


def test_a_model(stepped: list[Any]) -> None:
    lm, ids = model("prism+gated_delta", torch.float32).to(DEVICE), tokens(2, 9).to(DEVICE)
    caches = {name: PrismCache() for name in ("torch", "triton")}
    logits = {}
    with torch.no_grad():
        for name, cache in caches.items():
            with using(backend="torch"):
                lm(ids[:, :6], past_key_values=cache)
            count = len(stepped)
            with using(backend=name):
                parts = [lm(ids[:, i : i + 1], past_key_values=cache).logits for i in range(6, 9)]
            logits[name] = torch.cat(parts, 1)
            assert len(stepped) - count == (6 if name == "triton" else 0)
    assert_all_close("model", *({"logits": logits[n], **caches[n].tensors()} for n in ("triton", "torch")), 1e-5, {})


@torch.no_grad()
def test_a_captured_step_writes_its_own_states(stepped: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "capture", lambda run, *_: (run(), None))
    lm, ids, cache = model("prism*2", torch.float32).to(DEVICE), tokens(1, 6).to(DEVICE), PrismCache()
    lm(ids[:, :4], past_key_values=cache)
    with using(backend="triton"):
        step = Captured(lm, ids[:, 4:5], cache.states, torch.float32)
        places = [z.data_ptr() for state in step._step()[-1] for z in state.tensors().values()]
    assert places == [z.data_ptr() for state in step.states for z in state.tensors().values()]
    assert stepped


class Louder(GatedDelta):
    """A rule with its own output: the family's weights by role do not describe it."""

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return 2 * super().output(o, x, extra)


def _hooked(layer: Block) -> None:
    layer.mixer.rule.norm.register_forward_hook(lambda *given: 2 * given[-1])


def _replaced(layer: Block) -> None:
    layer.mixer.rule.qkv = nn.Sequential(layer.mixer.rule.qkv)


def _turned(layer: Block) -> None:
    taps = layer.mixer.rule.conv.weight
    taps.data = taps.data.t().contiguous().t()


CHANGES: dict[str, Callable[[Block], Any]] = {
    "nothing": lambda layer: None,
    "a hook": _hooked,
    "a replaced map": _replaced,
    "another norm of the output": lambda layer: setattr(
        layer.mixer.rule.norm, "norm", nn.LayerNorm(layer.mixer.rule.value_dim).requires_grad_(False).to(DEVICE)
    ),
    "taps of other strides": _turned,
    "another norm": lambda layer: setattr(layer, "mlp_norm", nn.LayerNorm(24).requires_grad_(False).to(DEVICE)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modified_layers_take_the_ordinary_way(change: str, stepped: list[Any]) -> None:
    layer, _ = block("prism", torch.float32)
    x = torch.randn(2, 4, 24)
    CHANGES[change](layer)
    with torch.no_grad(), using(backend="torch"):
        state = layer(x)[1]
    got = run(layer, x[:, :1], state, "triton")
    assert bool(stepped) == (change == "nothing")
    assert_all_close(change, got, run(layer, x[:, :1], state, "torch"), 1e-5, {})


def test_a_subclass_with_its_own_output_takes_the_ordinary_way(stepped: list[Any]) -> None:
    layer = Block(Louder, 24, 2, 0).eval()
    x = torch.randn(1, 3, 24)
    with torch.no_grad():
        run(layer, x, layer(x)[1], "triton")
    assert not stepped


@pytest.mark.parametrize("case", ["gradients", "autocast", "form"])
def test_other_calls_take_the_ordinary_way(case: str) -> None:
    x, autocast = torch.randn(2, 24, device=DEVICE), torch.autocast(DEVICE, torch.bfloat16)
    with torch.no_grad():
        assert token.allowed(x)
        with using(form="chunkwise") if case == "form" else autocast if case == "autocast" else torch.enable_grad():
            assert not token.allowed(x)


def test_the_first_token_takes_the_ordinary_way(stepped: list[Any]) -> None:
    layer, _ = block("prism", torch.float32)
    run(layer, torch.randn(2, 1, 24), State(), "triton")
    assert not stepped


def test_a_state_of_another_layer_is_refused_as_usual() -> None:
    layer, _ = block("prism", torch.float32)
    other, _ = block("prism", torch.float32, conv_size=3)
    x = torch.randn(2, 3, 24)
    with torch.no_grad():
        state = other(x, backend="torch")[1]
        with pytest.raises(ValueError, match="state does not fit rule 'prism'"):
            layer.decode(x[:, 0], state)
