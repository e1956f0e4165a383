"""Half-precision inputs: computed in float32, rounded once; the memory itself is never less than float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given

import prism
from prism.engine import FORMS
from tests.helpers import Problem, assert_close, examples, float32_tolerances, problems, relative_error, scales

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES)
@given(problem=problems())
@examples(10)
def test_error_is_that_of_rounding_the_result(form: str, dtype: torch.dtype, problem: Problem) -> None:
    """Against float64 on the same rounded inputs: at most twice the error of rounding the exact result."""
    assume(not problem.one_direction)
    inputs = problem.inputs(dtype)
    reference = problem.run(inputs, "recurrent")
    size = scales(reference, torch.float32)
    got = problem.run(inputs, form, dtype)
    single = float32_tolerances(problem, inputs, reference)
    for name, exact in reference.items():
        if name in ("final", "d_state"):  # float32 throughout
            tolerance = single[name]
        else:
            assert got[name].dtype == dtype
            tolerance = 2 * relative_error(exact.to(dtype), exact, size[name]) + single[name]
        assert_close(f"{form} {dtype} {name}", got[name], exact, tolerance, size[name])


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
