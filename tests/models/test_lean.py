"""Replayed steps on a CPU: the same numbers as ordinary ones, whatever changes between two steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism import rules
from prism.engine.tape.record import CannotRecordError, record
from prism.models import LeanCache, PrismCache, PrismForCausalLM
from prism.models import lean as lean_module
from prism.models.lean import LeanStep, room, step
from prism.models.replay import cache_for
from tests.models.stacks import model, tokens

FIXED = [name for name in rules.names() if rules.get(name).constant_state]


def started(lm: PrismForCausalLM, rows: int, count: int = 7) -> tuple[PrismCache, LeanCache]:
    """An ordinary cache and a lean one after the same prompt."""
    caches = PrismCache(), LeanCache()
    with torch.no_grad():
        for cache in caches:
            lm(tokens(rows, count), past_key_values=cache)
    return caches


@torch.no_grad()
def compare(lm: PrismForCausalLM, ordinary: PrismCache, lean: LeanCache, ids: Tensor, replayed: bool = True) -> None:
    """Both caches give the same logits for these tokens `[B, T]`, one at a time, and end in the same states."""
    for token in ids.split(1, 1):
        before = lean._step
        found = lm(token, past_key_values=lean).logits
        torch.testing.assert_close(found, lm(token, past_key_values=ordinary).logits, atol=1e-8, rtol=1e-8)
        assert (lean._step is not None and lean._step.holds(lean.states)) == replayed or before is not None
    for name, value in ordinary.tensors().items():
        torch.testing.assert_close(lean.tensors()[name], value, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("rule", FIXED)
def test_every_rule_gives_the_same_numbers(rule: str) -> None:
    lm = model((rule, rule))
    for rows in (3, 1):
        ordinary, lean = started(lm, rows)
        compare(lm, ordinary, lean, tokens(rows, 5, seed=2))
        assert isinstance(lean._step, LeanStep), "it was recorded"


@pytest.mark.parametrize("layers", ["prism*2+softmax", "hstu"])
def test_caches_that_grow_take_ordinary_steps(layers: str) -> None:
    lm = model(layers)
    ordinary, lean = started(lm, 2)
    compare(lm, ordinary, lean, tokens(2, 3), replayed=False)
    assert lean._step is None and type(cache_for(lm)) is PrismCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    lm = model("prism+gated_delta", dtype)
    ordinary, lean = started(lm, 2)
    for token in tokens(2, 6, seed=3).split(1, 1):
        with torch.no_grad():
            found, expected = (lm(token, past_key_values=cache).logits for cache in (lean, ordinary))
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, atol=0.1 if dtype == torch.bfloat16 else 1e-4, rtol=1e-2)
    assert lean._step is not None


def test_memories_in_bfloat16_stay_so() -> None:
    lm = model("prism", torch.float32)
    lean = LeanCache(torch.bfloat16)
    with torch.no_grad():
        lm(tokens(1, 4), past_key_values=lean)
        lm(tokens(1, 1), past_key_values=lean)
    assert lean._step is not None and lean.states[0].memory.dtype == torch.bfloat16


@pytest.mark.parametrize("replayed", [False, True])
def test_another_number_of_rows_is_refused_and_changes_nothing(replayed: bool) -> None:
    lm = model("prism*2")
    ordinary, lean = started(lm, 4)
    if replayed:
        compare(lm, ordinary, lean, tokens(4, 1))
    for rows in (1, 3, 5):
        for cache in (ordinary, lean):
            with pytest.raises(ValueError, match=rf"state has 4 rows \(memory .*\), x has {rows}"):
                step(lm, tokens(rows, 1)[:, 0], cache)
    compare(lm, ordinary, lean, tokens(4, 2, seed=2))
    lean.states = started(lm, 1)[1].states
    with pytest.raises(ValueError, match=r"state has 1 rows .* x has 4"):
        step(lm, tokens(4, 1)[:, 0], lean)


def test_models_on_a_cpu_get_a_lean_cache() -> None:
    lm = model("prism")
    assert type(cache_for(lm)) is LeanCache
    assert type(lm.generate(tokens(1, 3), max_new_tokens=2, return_dict_in_generate=True).past_key_values) is LeanCache
    with torch.inference_mode():
        made_there = model("prism")
    assert type(cache_for(made_there)) is PrismCache, "changes of its weights would not be seen"


@contextmanager
def hooked(lm: PrismForCausalLM) -> Iterator[None]:
    handle = lm.model.layers[0].mixer.register_forward_hook(lambda m, a, out: (2 * out[0], out[1]))
    yield
    handle.remove()


@contextmanager
def weight_changed_in_place(lm: PrismForCausalLM) -> Iterator[None]:
    with torch.no_grad():
        lm.model.layers[0].mixer.rule.qkv.weight.mul_(1.5)
    yield


@contextmanager
def small_weight_changed_in_place(lm: PrismForCausalLM) -> Iterator[None]:
    with torch.no_grad():
        lm.model.norm.weight.mul_(1.5)
    yield


@contextmanager
def weight_replaced(lm: PrismForCausalLM) -> Iterator[None]:
    lm.lm_head.weight = nn.Parameter(lm.lm_head.weight.detach() * 2)
    yield


@contextmanager
def data_replaced(lm: PrismForCausalLM) -> Iterator[None]:
    lm.lm_head.weight.data = lm.lm_head.weight.data * 2
    yield


@contextmanager
def module_replaced(lm: PrismForCausalLM) -> Iterator[None]:
    lm.model.layers[0].mlp = copy.deepcopy(lm.model.layers[0].mlp)
    with torch.no_grad():
        lm.model.layers[0].mlp.down.weight.mul_(3)
    yield


@contextmanager
def forward_replaced(lm: PrismForCausalLM) -> Iterator[None]:
    norm = lm.model.norm
    norm.forward = lambda x: 2 * x
    yield
    del norm.forward


@pytest.mark.parametrize(
    "change",
    [
        hooked,
        weight_changed_in_place,
        small_weight_changed_in_place,
        weight_replaced,
        data_replaced,
        module_replaced,
        forward_replaced,
    ],
)
def test_changes_of_the_model_are_seen(change: Any) -> None:
    lm = model("prism+gla")
    ordinary, lean = started(lm, 2)
    compare(lm, ordinary, lean, tokens(2, 2))
    token = tokens(2, 1, seed=5)
    with torch.no_grad():
        unchanged = lm(token, past_key_values=lean.copy()).logits
    with change(lm), torch.no_grad():
        found, expected = (lm(token, past_key_values=cache).logits for cache in (lean, ordinary))
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
        assert not torch.allclose(found.double(), unchanged, atol=1e-4), "it matters"
    compare(lm, ordinary, lean, tokens(2, 2, seed=6))


def test_autocast_takes_ordinary_steps() -> None:
    lm = model("prism", torch.float32)
    ordinary, lean = started(lm, 2)
    with torch.no_grad():
        for cache in (ordinary, lean):
            lm(tokens(2, 1), past_key_values=cache)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (lm(tokens(2, 1), past_key_values=cache).logits for cache in (lean, ordinary))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


def test_rows_come_and_go() -> None:
    """Between steps rows are selected, repeated and reordered; a power of two of rows shares one recording."""
    lm = model("prism+rwkv7")
    ordinary, lean = started(lm, 5)
    for index in ([4, 1, 0], [0, 1, 2, 2, 1, 0, 0], [6, 2], [1], [0, 0, 0]):
        for cache in (ordinary, lean):
            cache.batch_select_indices(torch.tensor(index))
        compare(lm, ordinary, lean, tokens(len(index), 3, seed=len(index)))
    assert [room(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    assert {made.rows for made in lean._steps.values() if made is not None} == {1, 2, 4, 8}


def test_steps_are_the_fast_way_to_the_same_logits() -> None:
    lm = model("prism")
    ordinary, lean = started(lm, 3)
    grown = PrismCache()
    with torch.no_grad():
        model("prism+softmax")(tokens(3, 7), past_key_values=grown)
        for token in tokens(3, 4, seed=8).T:
            expected = lm(token[:, None], past_key_values=ordinary).logits[:, -1]
            torch.testing.assert_close(step(lm, token, lean), expected)
    assert lean.tokens == ordinary.tokens == 11
    assert step(model("prism+softmax"), tokens(3, 1)[:, 0], grown).shape == (3, 61)


def test_a_copy_is_independent() -> None:
    lm = model("prism")
    ordinary, lean = started(lm, 2)
    compare(lm, ordinary, lean, tokens(2, 3))
    for duplicate in (lean.copy(), copy.deepcopy(lean)):
        saved = {name: value.clone() for name, value in duplicate.tensors().items()}
        compare(lm, ordinary, lean, tokens(2, 2, seed=4))
        assert all(torch.equal(value, saved[name]) for name, value in duplicate.tensors().items())


def test_resuming_does_not_change_a_bit() -> None:
    lm = model("prism*2", torch.float32)
    _, lean = started(lm, 1)
    with torch.no_grad():
        answers = []
        for token in tokens(1, 9, seed=7).split(1, 1):
            lean = LeanCache.load(lean.tensors()) if len(answers) in (1, 4, 5) else lean
            answers.append(lm(token, past_key_values=lean).logits)
        _, whole = started(lm, 1)
        for token, answer in zip(tokens(1, 9, seed=7).split(1, 1), answers, strict=True):
            assert torch.equal(lm(token, past_key_values=whole).logits, answer)


def test_an_interrupted_step_changes_nothing() -> None:
    lm = model("prism")
    ordinary, lean = started(lm, 1)
    compare(lm, ordinary, lean, tokens(1, 2))
    assert isinstance(lean._step, LeanStep)
    program = lean._step.programs[lean._step.turn]
    calls, half = program.calls, len(program.calls) // 2

    def interrupt() -> None:
        raise KeyboardInterrupt

    program.calls = [*calls[:half], interrupt]
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        lm(tokens(1, 1, seed=3), past_key_values=lean)
    program.calls = calls
    compare(lm, ordinary, lean, tokens(1, 3, seed=4))


def test_a_wrong_tape_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model("prism")
    ordinary, lean = started(lm, 1)
    real = lean_module.shortened
    monkeypatch.setattr(
        lean_module,
        "shortened",
        lambda tape: type(tape)(tape.inputs, real(tape).entries, (tape.outputs[0] + 1, *tape.outputs[1:])),
    )
    compare(lm, ordinary, lean, tokens(1, 3), replayed=False)
    assert lean._step is None


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [x * 2 if bool(x.sum() > 0) else x], "looks at a value"),
        (lambda x: [x[x > 0]], "looks at a value"),
        (lambda x: [x.clone().mul_(2)], "writes in place"),
        (lambda x: [x + torch.rand(3)], "random"),
        (lambda x: [torch.nn.functional.dropout(x, 0.5)], "random"),
    ],
)
def test_what_may_differ_from_call_to_call_is_not_recorded(function: Any, why: str) -> None:
    x = torch.randn(3)
    with pytest.raises(CannotRecordError, match=why):
        record(lambda: function(x), [x])
