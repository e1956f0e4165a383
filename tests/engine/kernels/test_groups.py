"""Heads that share queries and keys, tokens of several sub-steps, and many writes, in the chunk kernels."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import prism
from prism.rules.parts import l2_normalize
from tests.engine.kernels.problems import SMALLEST, tiles
from tests.engine.kernels.where import CAN_START, DEVICE, needs_kernels
from tests.helpers import unwritten_memory_is_nan

pytestmark = needs_kernels

if CAN_START:
    from prism.engine.kernels.memory import operator as memory
    from prism.engine.kernels.memory.configurations import Configuration, forced

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Any], Configuration]:
    """The tensors of an update and a state in float64, its options, and tile sizes."""
    T, n, L = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 6, 8]))
    H = draw(st.sampled_from([1, 2, 3, 4]))
    groups = st.sampled_from([g for g in (1, 2, 3, 4) if H % g == 0])
    B, K, V = 1 if H > 1 else 2, draw(st.sampled_from([1, 2])) * SMALLEST, SMALLEST
    generator = torch.Generator(DEVICE).manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    x = {"q": l2_normalize(normal(B, T, draw(groups), K)), "k": l2_normalize(normal(B, T * n, draw(groups), L, K))}
    x["w"] = normal(B, T * n, H, L, V)
    if (decay := draw(st.sampled_from([0.0, 0.2, 30.0]))) > 0.0:
        x["log_decay"] = -decay * uniform(B, T, H)
    erase = draw(st.sampled_from(["none", "first", "own", "write"]))
    if erase in ("own", "write"):
        x["erase_key"] = l2_normalize(normal(B, T * n, draw(groups), K))
    if erase in ("first", "own"):
        x["erase_strength"] = uniform(B, T * n, H)
    if erase == "write":
        x["erase_write"] = 0.5 * l2_normalize(normal(B, T * n, draw(groups), K))
    x["state"] = normal(B, H, K, V)
    options: dict[str, Any] = {"substeps": n, "erase_first": erase == "first"}
    if draw(st.booleans()):
        options |= {"reset": uniform(B, T) < 0.2, "mask": uniform(B, T) < 0.8}
    return x, options, tiles(16, draw(st.sampled_from([16, 32])), draw(st.sampled_from([None, 2])))


def everything(x: dict[str, Tensor], options: dict[str, Any], dtype: torch.dtype, form: str, backend: str) -> Any:
    leaves = {name: z.to(dtype).requires_grad_() for name, z in x.items()}
    update = prism.Update(**{name: z for name, z in leaves.items() if name != "state"}, **options)
    o, end = prism.memory(update, leaves["state"], form, backend)
    loss = o.square().sum() + (end * torch.linspace(-1, 1, end.shape[-1], dtype=dtype)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "end": end, **{f"d_{name}": d for name, d in zip(leaves, gradients, strict=True)}}


@settings(max_examples=6, deadline=None, phases=[Phase.generate])  # one example takes up to a second
@given(problems())
def test_every_result_equals_the_recurrence(problem: tuple[dict[str, Tensor], dict[str, Any], Configuration]) -> None:
    x, options, how = problem
    expected = everything(x, options, torch.float64, "recurrent", "torch")
    with unwritten_memory_is_nan(), forced(how):
        got = everything(x, options, torch.float32, "chunkwise", "triton")
    for name, wanted in expected.items():
        error = (got[name] - wanted).norm() / wanted.norm().clamp(min=0.1)
        assert error <= 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "fields",
    [{"heads": 4, "groups": 2}, {"heads": 2, "groups": 1, "substeps": 2, "packed": True}, {"writes": 6, "heads": 1}],
)
def test_half_precision_errs_at_most_twice_as_much_as_torch(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    accuracy: Any = importlib.import_module("accuracy")
    case = accuracy.Case(40, **{"writes": 1, "key_dim": 32, "value_dim": 32, "dtype": "float16", **fields})
    result = accuracy.check(case, DEVICE)
    sys.modules.pop("accuracy")
    assert result["good"], result["errors"]


def test_nothing_is_repeated_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys enter the kernels with their own heads, and without rows for the sub-steps."""
    entered: list[Any] = []
    run = memory.memory
    monkeypatch.setattr(memory, "memory", lambda *inputs: entered.append(inputs) or run(*inputs))
    q, k, w = torch.randn(1, 5, 1, 16), torch.randn(1, 10, 1, 1, 16), torch.randn(1, 10, 4, 1, 16)
    g, beta = -torch.rand(1, 5, 4), torch.rand(1, 10, 4)
    update = prism.Update(q, k, w, g, erase_strength=beta, erase_first=True, substeps=2)
    o, _ = prism.memory(update, form="chunkwise", backend="triton")
    if DEVICE == "cpu":  # on a GPU, widths are padded
        assert [z.data_ptr() for z in entered[0][:4]] == [z.data_ptr() for z in (q, k, w, g)]
    assert [list(z.shape[:3]) for z in entered[0][:2]] == [[1, 5, 1], [1, 10, 1]]
    assert o.shape == (1, 5, 4, 16)
