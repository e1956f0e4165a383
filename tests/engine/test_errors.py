"""Bad input raises one clear sentence that names the argument and the expectation, before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism.engine import step

B, T, H, G, K, L, V = 2, 5, 4, 2, 3, 2, 6
SHAPES = {
    "q": (B, T, G, K),
    "k": (B, T, G, L, K),
    "w": (B, T, H, L, V),
    "log_decay": (B, T, H),
    "erase_key": (B, T, G, K),
    "erase_strength": (B, T, H),
    "erase_write": (B, T, G, K),
    "reset": (B, T),
    "mask": (B, T),
}
FLAGS = ("reset", "mask")


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    if name in FLAGS:
        return torch.full(shape, name == "mask")
    return torch.zeros(shape)


def arguments(**changes: Any) -> dict[str, Any]:
    """A good update with every optional tensor (of the two erases the first), then the changes; None takes one out."""
    good = {name: tensor(name, shape) for name, shape in SHAPES.items()}
    del good["erase_strength" if "erase_write" in changes and "erase_strength" not in changes else "erase_write"]
    return {**good, **changes}


def refusal(call: Any) -> str:
    """The message, having checked that it is one sentence."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert message and "\n" not in message and ". " not in message and len(message) < 300, message
    return message


def test_valid_updates_are_accepted() -> None:
    prism.memory(prism.Update(**arguments()))
    prism.memory(prism.Update(**arguments(erase_write=torch.zeros(SHAPES["erase_write"]))))
    prism.memory(prism.Update(**arguments(log_decay=torch.zeros(B, T, H, K))))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("change", ["one dimension more", "one dimension less"])
def test_wrong_rank(name: str, change: str) -> None:
    shape = (1, *SHAPES[name]) if change == "one dimension more" else SHAPES[name][1:]
    message = refusal(lambda: prism.Update(**arguments(**{name: tensor(name, shape)})))
    assert message.startswith(f"{name} ")
    assert "[B, T" in message
    assert str(list(shape)) in message


# q sets B, T and K, and w sets H: a wrong size there is reported for the tensors that no longer fit.
@pytest.mark.parametrize(
    ("name", "axis"),
    [(name, axis) for name, shape in SHAPES.items() for axis in range(len(shape)) if name not in ("q", "w")]
    + [("w", 0), ("w", 1), ("q", 2)],
)
def test_wrong_size(name: str, axis: int) -> None:
    shape = list(SHAPES[name])
    shape[axis] += 1 if axis != 2 else 2 * H
    message = refusal(lambda: prism.Update(**arguments(**{name: tensor(name, tuple(shape))})))
    assert message.startswith(f"{name} ")
    assert "[B, T" in message or "heads" in message
    assert str(shape) in message


@pytest.mark.parametrize(("name", "axis"), [("q", 0), ("q", 1), ("q", 3), ("w", 2), ("w", 3)])
def test_wrong_size_of_q_or_w_is_reported(name: str, axis: int) -> None:
    shape = list(SHAPES[name])
    shape[axis] += 1
    message = refusal(lambda: prism.Update(**arguments(**{name: tensor(name, tuple(shape))})))
    assert message.split(" ")[0] in SHAPES
    assert "expected" in message and "[" in message


@pytest.mark.parametrize("name", ["q", "k", "erase_key", "erase_write"])
@pytest.mark.parametrize("heads", [0, 3, 8])
def test_heads_must_divide(name: str, heads: int) -> None:
    shape = list(SHAPES[name])
    shape[2] = heads
    message = refusal(lambda: prism.Update(**arguments(**{name: tensor(name, tuple(shape))})))
    assert message.startswith(f"{name} ")
    assert str(H) in message


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "w"])
def test_all_tensors_must_be_on_one_device(name: str) -> None:
    message = refusal(lambda: prism.Update(**arguments(**{name: tensor(name, SHAPES[name]).to("meta")})))
    assert message.startswith(f"{name} is on meta")


def test_a_state_is_on_the_device_of_its_update() -> None:
    state = torch.zeros(B, H, K, V, device="meta")
    assert refusal(lambda: prism.memory(prism.Update(**arguments()), state)).startswith("state is on meta")


@pytest.mark.parametrize("name", ["q", "w", "k"])
def test_nothing_is_empty(name: str) -> None:
    shape = list(SHAPES[name])
    shape[1] = 0
    refusal(lambda: prism.Update(**arguments(**{name: tensor(name, tuple(shape))})))


def test_no_tokens_at_all() -> None:
    empty = {name: tensor(name, (B, 0, *shape[2:])) for name, shape in SHAPES.items() if name != "erase_write"}
    assert "T ≥ 1" in refusal(lambda: prism.Update(**empty))


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in FLAGS])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_numbers_are_floating_point(name: str, dtype: torch.dtype) -> None:
    message = refusal(lambda: prism.Update(**arguments(**{name: torch.zeros(SHAPES[name], dtype=dtype)})))
    assert message.startswith(f"{name} ")
    assert "float" in message and str(dtype) in message


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_flags_are_bool(name: str, dtype: torch.dtype) -> None:
    message = refusal(lambda: prism.Update(**arguments(**{name: torch.ones(SHAPES[name], dtype=dtype)})))
    assert message.startswith(f"{name} ")
    assert "bool" in message and str(dtype) in message


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_tensors(name: str) -> None:
    message = refusal(lambda: prism.Update(**arguments(**{name: [0.0]})))
    assert message.startswith(f"{name} ")
    assert "[B, T" in message and "list" in message


def test_an_erase_is_a_key_and_one_of_two_strengths() -> None:
    both = refusal(
        lambda: prism.Update(
            **arguments(
                erase_write=tensor("erase_write", SHAPES["erase_write"]),
                erase_strength=tensor("erase_strength", (B, T, H)),
            )
        )
    )
    neither = refusal(lambda: prism.Update(**arguments(erase_strength=None)))
    for message in (both, neither):
        assert "erase_strength" in message and "erase_write" in message
    assert "erase_key" in refusal(lambda: prism.Update(**arguments(erase_key=None)))
    assert "erase_key" in refusal(
        lambda: prism.Update(**arguments(erase_key=None, erase_write=tensor("erase_write", SHAPES["erase_write"])))
    )


def test_an_erase_tied_to_the_first_key_sets_one_side_of_it() -> None:
    tied = prism.Update(**arguments(erase_strength=None), erase_write_first=True)
    assert tied.erase_write is not None and torch.equal(tied.erase_write, tied.k[..., 0, :])
    changed = replace(tied, k=tied.k + 1)
    assert changed.erase_write is not None and torch.equal(changed.erase_write, changed.k[..., 0, :])
    assert "erase_strength" in refusal(lambda: prism.Update(**arguments(), erase_write_first=True))
    both = arguments(erase_strength=None)
    assert "erase_first" in refusal(lambda: prism.Update(**both, erase_first=True, erase_write_first=True))
    without_key = arguments(erase_strength=None, erase_key=None)
    assert "erase_key" in refusal(lambda: prism.Update(**without_key, erase_write_first=True))


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("erase_on", "dacayed", ("decayed", "undecayed")),
        ("erase_on", None, ("decayed", "undecayed")),
        ("read", "during", ("after", "before")),
        ("substeps", 0, ("1",)),
        ("substeps", -1, ("1",)),
        ("substeps", 1.0, ("1",)),
        ("substeps", "2", ("1",)),
    ],
)
def test_unknown_options(name: str, value: Any, known: tuple[str, ...]) -> None:
    message = refusal(lambda: prism.Update(**arguments(**{name: value})))
    assert message.startswith(f"{name} ")
    assert repr(value) in message and all(word in message for word in known)


def test_substeps_need_as_many_rows() -> None:
    message = refusal(lambda: prism.Update(**arguments(substeps=2)))
    assert message.startswith("w ")
    assert str([B, 2 * T, H, L, V]) in message


@pytest.mark.parametrize("shape", [(B, T, H), (B, T, H, K)])
@pytest.mark.parametrize(
    ("value", "complaint"),
    [(float("nan"), "NaN"), (1e-3, "≤ 0"), (float("inf"), "≤ 0"), (-float("inf"), "-inf")],
)
def test_log_decay_is_finite_and_not_positive(shape: tuple[int, ...], value: float, complaint: str) -> None:
    log_decay = torch.zeros(shape)
    log_decay[1, 3, 2] = value
    message = refusal(lambda: prism.Update(**arguments(log_decay=log_decay)))
    assert message.startswith("log_decay ")
    assert complaint in message


@pytest.mark.parametrize("value", [float("nan"), 1.0, float("inf"), -float("inf")])
def test_values_on_padding_are_ignored(value: float) -> None:
    log_decay, mask = torch.zeros(B, T, H), torch.ones(B, T, dtype=torch.bool)
    log_decay[1, 3], mask[1, 3] = value, False
    prism.Update(**arguments(log_decay=log_decay, mask=mask))


def test_values_are_not_read_in_compiled_code() -> None:
    """Reading a value would split the graph; shapes are still checked there."""
    good = arguments()

    def build(log_decay: Tensor) -> Tensor:
        update = prism.Update(**{**good, "log_decay": log_decay})
        assert update.log_decay is not None
        return update.log_decay + 1

    compiled = torch.compile(build, backend="eager", fullgraph=True)
    assert torch.isnan(compiled(torch.full((B, T, H), torch.nan))).all()
    with pytest.raises(ValueError, match="log_decay"):
        build(torch.full((B, T, H), torch.nan))


@pytest.mark.parametrize("form", ["chunk", "Recurrent", "", None])
def test_unknown_form(form: Any) -> None:
    message = refusal(lambda: prism.memory(prism.Update(**arguments()), form=form))
    assert "form" in message and repr(form) in message
    assert all(known in message for known in ("recurrent", "parallel", "chunkwise", "scan"))


@pytest.mark.parametrize("backend", ["cuda", "Torch", "", None])
def test_unknown_backend(backend: Any) -> None:
    message = refusal(lambda: prism.memory(prism.Update(**arguments()), backend=backend))
    assert "backend" in message and repr(backend) in message
    assert all(known in message for known in ("torch", "triton", "fla"))


@pytest.mark.parametrize("form", ["recurrent", "parallel", "scan"])
def test_a_backend_that_cannot_serve_names_one_that_can(form: str) -> None:
    message = refusal(lambda: prism.memory(prism.Update(**arguments()), form=form, backend="fla"))
    assert "fla" in message and "torch" in message and form in message


def test_memory_takes_only_updates() -> None:
    message = refusal(lambda: prism.memory({"q": 1}))
    assert "update" in message and "Update" in message and "dict" in message


@pytest.mark.parametrize("shape", [(B, H, V, K), (H, K, V), (1, H, K, V), (B, G, K, V), (B, H, K, V, 1)])
@pytest.mark.parametrize("form", ["auto", "recurrent", "parallel", "chunkwise", "scan"])
def test_wrong_state_shape(shape: tuple[int, ...], form: str) -> None:
    message = refusal(lambda: prism.memory(prism.Update(**arguments()), torch.zeros(shape), form))
    assert message.startswith("state ")
    assert str([B, H, K, V]) in message and str(list(shape)) in message


@pytest.mark.parametrize("state", [torch.zeros(B, H, K, V, dtype=torch.int64), {"memory": 0}])
def test_wrong_kind_of_state(state: Any) -> None:
    assert refusal(lambda: prism.memory(prism.Update(**arguments()), state)).startswith("state ")


def test_step_takes_one_token() -> None:
    message = refusal(lambda: step(prism.Update(**arguments())))
    assert "one token" in message and str(T) in message


def test_step_checks_the_state_too() -> None:
    one = {name: tensor(name, (B, 1, *shape[2:])) for name, shape in SHAPES.items() if name != "erase_write"}
    assert refusal(lambda: step(prism.Update(**one), torch.zeros(B, H, V, K))).startswith("state ")
