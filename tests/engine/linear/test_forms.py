"""Every form computes the same memory: each against the recurrence in float64, and the recurrence against the equation."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

import prism
from prism.engine import FORMS, engine_of
from tests.helpers import (
    INPUTS,
    Problem,
    assert_all_close,
    assert_close,
    definition,
    examples,
    float32_tolerances,
    problems,
    relative_error,
    scales,
)

FLOAT64, FLOAT32 = 1e-10, 1e-5
DELTA = Problem(tokens=65, heads=4, query_heads=1, key_heads=2, erase_heads=2, writes=3)


def agree(problem: Problem, *forms: str) -> None:
    """Outputs, final state and all gradients, in both precisions, on the same inputs."""
    inputs = problem.inputs()
    reference = problem.run(inputs, "recurrent")
    for form in forms:
        assert_all_close(f"{form} float64", problem.run(inputs, form), reference, FLOAT64, scales(reference))
    if problem.one_direction:
        return
    tolerances, size = float32_tolerances(problem, inputs, reference), scales(reference, torch.float32)
    for form in forms:
        got = problem.run(inputs, form, torch.float32)
        for name, tolerance in tolerances.items():
            assert_close(f"{form} float32 {name}", got[name], reference[name], tolerance, size[name])


def test_the_linear_memory_claims_all_forms() -> None:
    assert set(engine_of(prism.Update).forms) == set(FORMS)


@given(problem=problems(tokens=st.integers(1, 9)))
@examples(100)
def test_recurrence_is_the_equation(problem: Problem) -> None:
    inputs = problem.inputs()
    update = problem.update(inputs)
    o, state = prism.memory(update, inputs.get("state"), "recurrent")
    outputs, final = definition(update, inputs.get("state"))
    assert_close("o", o, torch.from_numpy(outputs), 1e-13)
    assert_close("final", state, torch.from_numpy(final), 1e-13)


@given(problem=problems(tokens=st.integers(1, 4), batch=1, key_dim=3, value_dim=2))
@examples(10)
def test_recurrence_has_the_gradients_of_finite_differences(problem: Problem) -> None:
    inputs = problem.inputs()
    names = [name for name in (*INPUTS, "state") if name in inputs]
    if problem.rate in ("zero", "mixed") and "log_decay" in inputs:
        inputs["log_decay"] = inputs["log_decay"] - 1e-3  # a difference must not step over 0, where updates end

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = {**inputs, **dict(zip(names, values, strict=True))}
        return prism.memory(problem.update(tensors), tensors.get("state"), "recurrent")

    leaves = [inputs[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(function, leaves)


@given(problem=problems())
@examples(60)
def test_forms_agree(problem: Problem) -> None:
    agree(problem, *FORMS)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 257])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_forms_agree_at_every_length(tokens: int, decay: str) -> None:
    agree(replace(DELTA, tokens=tokens, decay=decay, rate="mixed", reset="random"), "parallel", "chunkwise", "scan")


@pytest.mark.parametrize("erase_on", ["decayed", "undecayed"])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_chunkwise_agrees_over_many_chunks_and_wide_heads(decay: str, read: str, erase_on: str) -> None:
    """Long enough for several segments of chunkwise, wide enough for its other chunk size."""
    some = replace(
        DELTA, heads=2, query_heads=1, key_heads=2, decay=decay, read=read, erase_on=erase_on, reset="random"
    )
    agree(replace(some, tokens=1100, mask="holes"), "chunkwise")
    agree(replace(some, tokens=150, key_dim=80, value_dim=70), "chunkwise")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", [("q",), ("w", "state"), ("erase_strength",), ("log_decay",), ("k", "erase_key")])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gradients_of_some_inputs_only(form: str, decay: str, names: tuple[str, ...]) -> None:
    """From the outputs alone, or from the final state alone, and of some inputs while the others have none."""
    problem = replace(DELTA, decay=decay, mask="holes", batch=2)
    inputs = problem.inputs()

    def gradients(form: str, of: str) -> tuple[torch.Tensor | None, ...]:
        leaves = {name: x.clone() for name, x in inputs.items()}
        wanted = [leaves[name].requires_grad_() for name in names]
        o, final = prism.memory(problem.update(leaves), leaves["state"], form)
        loss = (o * inputs["d_output"]).sum() if of == "o" else (final * inputs["d_state"]).sum()
        return torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else (None,) * len(wanted)

    for of in ("o", "final"):
        for name, got, expected in zip(names, gradients(form, of), gradients("recurrent", of), strict=True):
            none = torch.zeros_like(inputs[name])  # the final state does not depend on q
            assert_close(
                f"d_{name} of {of}", none if got is None else got, none if expected is None else expected, FLOAT64
            )


@given(
    problem=problems(
        tokens=st.sampled_from([65, 128, 257]), erase="strength", erase_on="decayed", alike=True, beta=(1.9, 2.0)
    )
)
@example(problem=replace(DELTA, tokens=257, decay="none", alike=True, beta=(1.9, 2.0), seed=1))
@example(problem=Problem(65, key_dim=80, value_dim=48, writes=2, decay="none", alike=True, beta=(1.9, 2.0), seed=2))
@example(problem=Problem(257, erase="first", key_dim=80, writes=2, alike=True, beta=(1.9, 2.0)))
@examples(10)
def test_reflections_along_nearly_equal_keys(problem: Problem) -> None:
    agree(problem, "parallel", "chunkwise", "scan")


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "scan"])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("rate", [50.0, 700.0, 1e4])
def test_strong_decay_neither_overflows_nor_loses_a_token(form: str, decay: str, rate: float) -> None:
    """A token that forgets everything must not disturb its neighbours, in values or gradients."""
    problem = replace(DELTA, tokens=130, decay=decay, rate="weak")
    inputs = problem.inputs()
    inputs["log_decay"][:, [0, 31, 64, 65, 100]] = -rate
    reference = problem.run(inputs, "recurrent")
    for dtype, tolerance in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        assert_all_close(f"{dtype}", problem.run(inputs, form, dtype), reference, tolerance, scales(reference, dtype))


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "scan"])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("rate", [1.0, 5.0])
def test_small_gradients_of_a_strong_decay_keep_their_digits(form: str, decay: str, rate: float) -> None:
    """At -5 a token the gradient of the decay is a hundredth of the others; it is compared with itself nonetheless."""
    problem = replace(DELTA, tokens=100, decay=decay)
    inputs = problem.inputs()
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -rate)
    reference = problem.run(inputs, "recurrent")
    for dtype, tolerance in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        assert_all_close(f"{dtype}", problem.run(inputs, form, dtype), reference, tolerance, {})


@pytest.mark.parametrize("form", FORMS)
def test_tensors_may_be_strided(form: str) -> None:
    """Heads-first tensors seen through a transpose, and expanded ones, give what contiguous ones give."""
    problem = replace(DELTA, tokens=70, query_heads=4, key_heads=4, erase_heads=4)
    inputs = problem.inputs()
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items() if name in INPUTS}
    strided["k"] = inputs["k"][:, :, :, :1].expand_as(inputs["k"])
    inputs["k"] = strided["k"].contiguous()
    o, state = prism.memory(problem.update(inputs), inputs["state"], form)
    same_o, same_state = prism.memory(problem.update(strided), inputs["state"], form)
    assert_close("o", same_o, o, 1e-13)
    assert_close("final", same_state, state, 1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_incoming_state_are_left_as_they_were(form: str) -> None:
    problem = replace(DELTA, mask="holes", reset="random")
    inputs = problem.inputs()
    before = {name: x.clone() for name, x in inputs.items()}
    prism.memory(problem.update(inputs), inputs["state"], form)
    for name, x in before.items():
        assert torch.equal(inputs[name], x), name


@pytest.mark.parametrize("form", FORMS)
def test_tokens_do_not_see_the_future(form: str) -> None:
    problem = replace(DELTA, tokens=100, decay="channel")
    inputs = problem.inputs()
    o, _ = prism.memory(problem.update(inputs), inputs["state"], form)
    for name in ("q", "k", "w", "log_decay", "erase_key", "erase_strength"):
        inputs[name][:, 70:] = inputs[name][:, 70:].roll(1, dims=1)
    changed, _ = prism.memory(problem.update(inputs), inputs["state"], form)
    assert_close("o before the change", changed[:, :70], o[:, :70], 1e-13)
    assert relative_error(changed[:, 70:], o[:, 70:]) > 0.1


@pytest.mark.parametrize("tokens", [1, 2, 64, 257])
def test_auto_is_one_of_the_forms(tokens: int) -> None:
    problem = replace(DELTA, tokens=tokens)
    inputs = problem.inputs()
    reference = problem.run(inputs, "recurrent")
    assert_all_close("auto", problem.run(inputs, "auto"), reference, FLOAT64, scales(reference))


def test_an_error_of_one_part_in_a_thousand_is_seen() -> None:
    """The yardstick itself: wrong numbers, NaN and wrong zeros do not pass."""
    x = torch.randn(4, 5)
    assert_close("same", x, x, 1e-12)
    for wrong in (x * 1.001, torch.where(x > 1, torch.nan, x), torch.full_like(x, torch.inf)):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close("wrong", wrong, x, 1e-5)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("not zero", x, torch.zeros_like(x), 1e-5)
    assert_close("nearly zero", 1e-9 * x, torch.zeros_like(x), 1e-5, scale=1.0)
