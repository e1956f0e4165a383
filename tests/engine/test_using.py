"""`using` sets what "auto" stands for, inside its block only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import prism
from prism.engine import BACKENDS, FORMS, layer_ops, using
from prism.engine.kernels import available
from prism.engine.memory import in_place_equivalent

engine = import_module("prism.engine.memory")  # the package's attribute of that name is the function
UPDATE = prism.Update(torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 1, 8), torch.randn(1, 5, 2, 1, 4))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The form and backend of every call of `memory`."""
    calls: list[tuple[str, str]] = []
    original = engine.chosen

    def spy(*arguments: object) -> tuple[str, object]:
        form, implementation = original(*arguments)
        calls.append((form, implementation.backend))
        return form, implementation

    monkeypatch.setattr(engine, "chosen", spy)
    yield calls
    assert engine.resolve() == engine.AUTO and not engine._entered, "a block is still open"


def test_auto_is_the_choice_of_the_block(taken: list[tuple[str, str]]) -> None:
    for form in FORMS:
        with using(form=form, backend="torch"):
            prism.memory(UPDATE)
            prism.memory(UPDATE, form="recurrent")
    prism.memory(UPDATE)
    expected = [pair for form in FORMS for pair in ((form, "torch"), ("recurrent", "torch"))]
    assert taken == [*expected, ("chunkwise", "torch")]


NAMES = st.tuples(st.sampled_from(["auto", *FORMS]), st.sampled_from(["auto", *BACKENDS]))


@given(blocks=st.lists(NAMES, max_size=5), asked=NAMES)
def test_the_innermost_name_counts(blocks: list[tuple[str, str]], asked: tuple[str, str]) -> None:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(using(*block))
        for place, got in enumerate(engine.resolve(*asked)):
            named = [choice[place] for choice in [*blocks, asked] if choice[place] != "auto"]
            assert got == (named[-1] if named else "auto")
        assert engine._latest == engine.resolve()
    assert engine.resolve() == engine._latest == engine.AUTO


def test_an_error_ends_the_block() -> None:
    with pytest.raises(KeyError), using(form="scan"):
        raise KeyError
    assert engine.resolve() == engine.AUTO and not engine._entered


def test_threads_and_tasks_choose_independently() -> None:
    seen: dict[str, str] = {}
    both = threading.Barrier(2)

    def in_thread(form: str) -> None:
        with using(form=form):
            both.wait(10)
            seen[f"thread {form}"] = engine.resolve()[0]
            both.wait(10)

    threads = [threading.Thread(target=in_thread, args=(form,)) for form in ("scan", "parallel")]
    with using(form="recurrent"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen["thread recurrent"] = engine.resolve()[0]

    async def in_task(form: str) -> None:
        with using(form=form):
            await asyncio.sleep(0)
            seen[f"task {form}"] = engine.resolve()[0]
            await asyncio.sleep(0)

    async def tasks() -> None:
        await asyncio.gather(in_task("scan"), in_task("parallel"))

    asyncio.run(tasks())
    assert len(seen) == 5 and all(name.split()[1] == form for name, form in seen.items())
    assert not engine._entered


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"form": "chunks"}, "unknown form 'chunks': choose from auto, recurrent, parallel, chunkwise, scan, serial"),
        ({"backend": "cuda"}, "unknown backend 'cuda': choose from auto, torch, triton, fla"),
    ],
)
def test_a_wrong_name_is_refused_at_once(names: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence), using(**names):
        raise AssertionError("entered")


def test_a_form_that_a_memory_lacks_is_refused() -> None:
    mixer, x = prism.Mixer("softmax", 16, 2), torch.randn(1, 3, 16)
    with using(form="scan"), pytest.raises(ValueError, match="form 'scan' cannot serve Attend, which has the forms"):
        mixer(x)


def test_a_mixer_and_a_decode_step_follow(taken: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = prism.Mixer("mom", 16, 2), torch.randn(1, 7, 16)
    with using(form="parallel"):
        mixer(x)
        assert taken == [("parallel", "torch")]
        assert not in_place_equivalent(UPDATE, "auto") and in_place_equivalent(UPDATE, "recurrent")
    with using(backend="fla"), pytest.raises(ValueError, match="backend 'fla' has no form 'recurrent'"):
        prism.engine.memory_(UPDATE, torch.zeros(1, 2, 8, 4))


class _OnGpu:
    """The attributes of a tensor that `use_kernel` reads."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cuda")


@pytest.mark.parametrize(("backend", "used"), [("auto", True), ("triton", True), ("fla", True), ("torch", False)])
def test_torch_turns_off_the_kernels_around_the_memory(
    backend: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "PROBLEM", None)
    monkeypatch.setattr(available, "outdated", lambda x: False)
    with using(backend=backend):
        assert layer_ops.use_kernel(_OnGpu()) is used  # type: ignore[arg-type]
    seen: list[bool] = []
    mixer = prism.Mixer("gated_delta", 16, 2)
    monkeypatch.setattr(mixer.rule, "output", lambda o, x, extra: seen.append(layer_ops.use_kernel(_OnGpu())) or x)
    if backend in ("auto", "torch"):
        mixer(torch.randn(1, 3, 16), backend=backend)
        assert seen == [used]


def test_compiled_code_follows_the_block_around_it() -> None:
    def asked(x: Tensor) -> Tensor:
        return x + (10 if engine.resolve()[0] == "scan" else 1)

    compiled = torch.compile(asked, backend="eager", fullgraph=True)
    zero = torch.zeros(())
    answers = [compiled(zero).item()]
    with using(form="scan"):
        answers.append(compiled(zero).item())
    answers.append(compiled(zero).item())
    assert answers == [1, 10, 1]


def test_a_compiled_mixer_follows() -> None:
    mixer, x = prism.Mixer("linear", 8, 1).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    expected, _ = mixer(x)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    with using(form="recurrent", backend="torch"):
        y, _ = compiled(x)
    z, _ = torch.compile(mixer, backend="eager", fullgraph=True)(x, form="parallel", backend="torch")
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(z, expected)
