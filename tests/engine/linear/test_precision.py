"""Half-precision inputs: computed in float32, rounded once; the memory itself is never less than float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given

import prism
from prism.engine import FORMS
from tests.helpers import Problem, assert_close, examples, float32_tolerances, problems, relative_error, scales

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@given(problem=problems())
@examples(10)
def test_error_is_that_of_rounding_the_result(dtype: torch.dtype, problem: Problem) -> None:
    """Against float64 on the same rounded inputs: at most twice the error of rounding the exact result."""
    assume(not problem.one_direction)
    inputs = problem.inputs(dtype)
    reference = problem.run(inputs, "recurrent")
    size = scales(reference, torch.float32)
    tolerances = float32_tolerances(problem, inputs, reference)
    halved = reference.keys() - {"final", "d_state"}  # these two are float32 throughout
    for name in halved:
        tolerances[name] += 2 * relative_error(reference[name].to(dtype), reference[name], size[name])
    for form in FORMS:
        got = problem.run(inputs, form, dtype)
        assert all(got[name].dtype == dtype for name in halved)
        for name, exact in reference.items():
            assert_close(f"{form} {dtype} {name}", got[name], exact, tolerances[name], size[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_float32_decay_among_half_precision_inputs_keeps_its_digits(form: str, dtype: torch.dtype) -> None:
    """A decay of .9999 is 1 in bfloat16: over 300 tokens that is the difference between forgetting 3 % and nothing."""
    problem = Problem(tokens=300, erase="none")
    inputs = problem.inputs(dtype)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -1e-4)
    halves = {name: x.to(dtype) for name, x in inputs.items() if name != "log_decay"}
    halves["log_decay"] = inputs["log_decay"].float()
    o, state = prism.memory(problem.update(halves), inputs["state"].float(), form)
    exact, final = prism.memory(problem.update(inputs), inputs["state"], "recurrent")
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    assert_close("final", state, final, 1e-5)
    assert_close("o", o, exact, 2 * relative_error(exact.to(dtype), exact))
