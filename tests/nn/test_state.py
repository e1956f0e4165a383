"""`State` prints on one line, is a pytree for torch.export and goes into a safetensors file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from prism import Mixer, State, rules


@pytest.mark.parametrize("name", rules.names())
def test_a_state_is_printed_in_one_line_without_its_numbers(name: str) -> None:
    _, state = Mixer(name, 32, 2)(torch.randn(2, 3, 32))
    printed = repr(state)
    assert "\n" not in printed and len(printed) <= 120 and "tensor(" not in printed
    first, value = next(iter(state.tensors().items()))
    assert f"State({first}={list(value.shape)}" in printed
    assert (" more" in printed) is any(key not in printed for key in state.tensors())


def test_an_empty_state_and_a_dtype_are_printed() -> None:
    assert repr(State()) == "State(empty)"
    state = State(torch.zeros(1, 2), {"place": torch.zeros(1, dtype=torch.int64)}, overwrite=True)
    assert repr(state) == "State(memory=[1, 2], carry.place=[1] int64, overwrite=True)"


@pytest.mark.parametrize("names", [("x",), ("memory", "memory.k"), ("carry.conv", "carry"), ("memories",)])
def test_tensors_that_are_no_state_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"'.*' is not a tensor of a State, .*: load what `State.tensors` returned"):
        State.load({name: torch.zeros(1) for name in names})
    assert State.load({}).tensors() == {}


def test_rows_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must be an integer tensor .n., got list: pass torch.tensor.rows."):
        State(torch.zeros(2, 3)).index_select([0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["prism", "softmax"])
def test_a_state_is_a_tree_of_its_tensors(name: str) -> None:
    _, state = Mixer(name, 16, 2)(torch.randn(2, 3, 16))
    leaves, tree = pytree.tree_flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len(tensors) == len(state.tensors())
    again = pytree.tree_unflatten(leaves, tree)
    assert isinstance(again, State) and all(again.tensors()[k] is v for k, v in state.tensors().items())


@pytest.mark.parametrize(("name", "trainable"), [("prism", True), ("softmax", False)])
def test_a_mixer_is_exported(name: str, trainable: bool) -> None:
    torch.manual_seed(0)
    mixer = Mixer(name, 16, 2).requires_grad_(trainable)
    x = torch.randn(2, 4, 16)
    _, state = mixer(x)
    state = state.detach()
    exported = torch.export.export(mixer, (x, state)).module()
    x, state = torch.randn(2, 4, 16), state.map(lambda part: part * 2 if part.is_floating_point() else part)
    y, end = exported(x, state)
    expected, expected_end = mixer(x, state)
    assert torch.allclose(y, expected, atol=1e-6) and isinstance(end, State)
    for key, value in expected_end.tensors().items():
        assert torch.allclose(end.tensors()[key].double(), value.double(), atol=1e-6), key


@pytest.mark.parametrize("rule", rules.names())
def test_a_state_is_kept_on_disk(rule: str, tmp_path: Path) -> None:
    mixer, x = Mixer(rule, width=16, heads=2).eval(), torch.randn(2, 9, 16)
    with torch.no_grad():
        _, state = mixer(x[:, :5])
        save_file({name: value.contiguous() for name, value in state.tensors().items()}, tmp_path / "s.safetensors")
        loaded = State.load(load_file(tmp_path / "s.safetensors"))
        assert torch.equal(mixer(x[:, 5:], loaded)[0], mixer(x[:, 5:], state)[0])
