"""Compiled code on the CPU runs the chunk form as one operator, with the results of eager code and for every length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import prism
from prism.engine.linear.chunks import Fields, Kind
from prism.engine.linear.chunkwise import _operator, in_chunks
from prism.engine.update import Steps
from tests.helpers import examples

ERASES = ("none", "groups", "write", "first")


def random_steps(tokens: int, erase: str, decays: bool, resets: bool, seed: int = 0) -> tuple[Steps, Tensor]:
    """Steps without an erase ("none"; "groups": heads share queries and keys), with separate columns for it ("write") or
    along the first key ("first")."""
    torch.manual_seed(seed)
    shape = (2, tokens, 2)
    beta = torch.rand(*shape, dtype=torch.float64)
    keys = torch.nn.functional.normalize(torch.randn(3, *shape, 8, dtype=torch.float64), dim=-1)
    shared = slice(1 if erase == "groups" else None)
    steps = Steps(
        q=keys[0][:, :, shared],
        k=torch.stack([keys[1], keys[2]], 3)[:, :, shared],
        w=torch.randn(*shape, 2, 4, dtype=torch.float64),
        log_decay=-torch.rand(*shape, dtype=torch.float64) if decays else None,
        erase_key=keys[1] if erase == "write" else None,
        erase_write=keys[1] * beta.unsqueeze(-1) if erase == "write" else None,
        erase_strength=beta if erase == "first" else None,
        reset=torch.rand(2, tokens) < 0.05 if resets else None,
        erase_decayed=bool(seed % 2),
        read_after=bool(seed % 3),
        substeps=1,
        out_dtype=torch.float64,
    )
    for name in Fields._fields[:-1]:
        if getattr(steps, name) is not None:
            object.__setattr__(steps, name, getattr(steps, name).detach().requires_grad_())
    return steps, torch.randn(2, 2, 8, 4, dtype=torch.float64, requires_grad=True)


@given(
    tokens=st.integers(1, 80),
    erase=st.sampled_from(ERASES),
    decays=st.booleans(),
    resets=st.booleans(),
    seed=st.integers(0, 5),
)
@examples(30)
def test_the_operator_equals_eager_code(tokens: int, erase: str, decays: bool, resets: bool, seed: int) -> None:
    """Segments of 32 rows in chunks of 8: several segments, and partial last chunks."""
    steps, S = random_steps(tokens, erase, decays, resets, seed)
    x, kind = Fields(*(getattr(steps, name) for name in Fields._fields)), Kind(8, 32, seed % 2 == 0, seed % 3 == 0)
    leaves = [S, *(z for z in x[:-1] if z is not None)]
    results = []
    for run in (lambda: in_chunks(steps, S, 8, 32), lambda: _operator(*x, S, *kind, True)[:2]):
        o, end = run()
        results.append((o, end, *torch.autograd.grad(o.sin().sum() + end.cos().sum(), leaves)))
    for eager, operator in zip(*results, strict=True):
        torch.testing.assert_close(operator, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("erase", ERASES)
def test_torch_accepts_the_operator(erase: str) -> None:
    """Schema, shapes without data, autograd and tracing with unknown sizes."""
    steps, S = random_steps(37, erase, True, True)
    x = [getattr(steps, name) for name in Fields._fields]
    torch.library.opcheck(_operator, (*x, S, *Kind(8, 32, False, False), True))


def test_compiled_code_has_one_operator_per_layer_and_serves_other_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    mixer = prism.Mixer("prism", 16, 2)
    compiled = torch.compile(mixer, backend=counter, fullgraph=True, dynamic=True)
    compiled(torch.randn(1, 70, 16))
    compilations = counter.frame_count
    for tokens in (530, 97):  # two segments, and one
        x = torch.randn(1, tokens, 16)
        torch.testing.assert_close(compiled(x)[0], mixer(x)[0], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == compilations
    names = [str(node.target) for node in counter.graphs[-1].graph.nodes if node.op == "call_function"]
    assert sum("prism.chunkwise" in name for name in names) == 1


def test_an_operator_that_saved_nothing_refuses_a_backward_pass() -> None:
    steps, S = random_steps(9, "write", True, False)
    x = [getattr(steps, name) for name in Fields._fields]
    o, *_ = _operator(*x, S, *Kind(8, 32, False, False), False)
    with pytest.raises(RuntimeError, match="save=False"):
        o.sum().backward()
