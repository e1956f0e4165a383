"""Split, padded and packed sequences give the same memory as one pass over each sequence."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import prism
from prism.engine import FORMS
from tests.helpers import (
    INPUTS,
    Problem,
    Tensors,
    assert_all_close,
    assert_close,
    differentiate,
    examples,
    problems,
    scales,
)

EXACT = 1e-10
PER_ROW = ("k", "w", "erase_key", "erase_strength", "erase_write")
"""The tensors with a row for every sub-step; the others have one for every token."""
TIMED = (*INPUTS, "mask", "reset", "d_output")


def cut(tensors: Tensors, start: int, stop: int, substeps: int) -> Tensors:
    """The tokens start … stop of every tensor with a token axis."""
    part = {}
    for name in TIMED:
        if name in tensors:
            n = substeps if name in PER_ROW else 1
            part[name] = tensors[name][:, start * n : stop * n]
    return part


def row(tensors: Tensors, index: int) -> Tensors:
    return {name: x[index : index + 1] for name, x in tensors.items()}


def place(x: Tensor, where: Tensor, length: int, fill: float, substeps: int) -> Tensor:
    """`[1, T·n, …]` → `[1, length·n, …]` with token i at place where[i], all others holding `fill`."""
    out = x.new_full((1, length, substeps, *x.shape[2:]), fill)
    out[:, where] = x.unflatten(1, (-1, substeps))
    return out.flatten(1, 2)


@given(problem=problems(tokens=st.integers(2, 140)), data=st.data())
@examples(60)
def test_chained_segments_are_one_pass(problem: Problem, data: st.DataObject) -> None:
    """Also if the segments are computed in different forms."""
    inside = st.integers(1, problem.tokens - 1)
    borders = [0, *sorted(data.draw(st.sets(inside, min_size=1, max_size=4), label="borders")), problem.tokens]
    forms = [data.draw(st.sampled_from(FORMS), label="form") for _ in borders[1:]]
    inputs = problem.inputs()

    def chain(leaves: Tensors) -> tuple[Tensor, Tensor]:
        state, outputs = leaves.get("state"), []
        for form, start, stop in zip(forms, borders[:-1], borders[1:], strict=True):
            o, state = prism.memory(problem.update(cut(leaves, start, stop, problem.substeps)), state, form)
            outputs.append(o)
        assert state is not None
        return torch.cat(outputs, 1), state

    reference = problem.run(inputs, "recurrent")
    assert_all_close("chain", differentiate(chain, inputs, torch.float64), reference, EXACT, scales(reference))


@pytest.mark.parametrize("padding", ["left", "right", "holes"])
@given(
    problem=problems(tokens=st.integers(1, 70), batch=3, mask="none"),
    lengths=st.lists(st.integers(0, 70), min_size=3, max_size=3),
    spare=st.integers(0, 20),
    poison=st.sampled_from([0.0, float("nan"), float("inf"), -float("inf"), 1e30]),
)
@examples(12)
def test_padding_changes_nothing(padding: str, problem: Problem, lengths: list[int], spare: int, poison: float) -> None:
    """A padded row equals the row alone, in values and gradients, for any values on padding."""
    inputs = problem.inputs()
    n, total = problem.substeps, problem.tokens + spare
    generator = torch.Generator().manual_seed(problem.seed)
    padded: dict[str, list[Tensor]] = {name: [] for name in (*TIMED, "state", "d_state")}
    places, references = [], []
    for index, length in enumerate(min(length, problem.tokens) for length in lengths):
        if padding == "holes":
            where = torch.randperm(total, generator=generator)[:length].sort().values
        else:
            where = torch.arange(length) + (total - length if padding == "left" else 0)
        alone = {**row(inputs, index), **cut(row(inputs, index), 0, length, n)}
        padded["mask"].append(torch.zeros(1, total, dtype=torch.bool).index_fill(1, where, True))
        for name, x in alone.items():
            if name in ("state", "d_state"):
                padded[name].append(x)
            elif name == "reset":  # pads may carry a reset; it is ignored
                padded[name].append(place(x, where, total, True, 1))
            else:
                fill = 0.0 if name == "d_output" else poison
                padded[name].append(place(x, where, total, fill, n if name in PER_ROW else 1))
        places.append(where)
        references.append(problem.run(alone, "recurrent") if length else None)
    batch = {name: torch.cat(rows) for name, rows in padded.items() if rows}
    together = {form: problem.run(batch, form) for form in FORMS}
    for (index, (where, reference)), form in product(enumerate(zip(places, references, strict=True)), FORMS):
        got = row(together[form], index)
        if reference is None:  # no real token: the state goes through
            before = inputs["state"][index : index + 1] if "state" in inputs else torch.zeros_like(got["final"])
            assert torch.equal(got["final"], before), form
            assert all(torch.count_nonzero(x) == 0 for name, x in got.items() if name not in ("final", "d_state"))
            continue
        expected = {}
        for name, x in reference.items():
            timed = name not in ("final", "d_state")
            expected[name] = place(x, where, total, 0.0, n if name[2:] in PER_ROW else 1) if timed else x
        assert_all_close(f"{form}, row {index}:", got, expected, EXACT, scales(reference))


@given(
    problem=problems(tokens=st.integers(1, 70), batch=3, mask="none", reset="none"),
    data=st.data(),
)
@examples(20)
def test_packed_documents_are_separate_sequences(problem: Problem, data: st.DataObject) -> None:
    """The first document continues the incoming state; the final state is the last document's."""
    n = problem.substeps
    inputs = problem.inputs()
    lengths = [data.draw(st.integers(1, problem.tokens), label="length") for _ in range(3)]
    documents = [cut(row(inputs, i), 0, length, n) for i, length in enumerate(lengths)]
    packed = {name: torch.cat([document[name] for document in documents], 1) for name in documents[0]}
    packed["reset"] = torch.zeros(1, sum(lengths), dtype=torch.bool)
    packed["reset"][:, [lengths[0], lengths[0] + lengths[1]]] = True
    packed["d_state"] = inputs["d_state"][2:]
    documents[2]["d_state"] = inputs["d_state"][2:]
    if "state" in inputs:
        packed["state"] = documents[0]["state"] = inputs["state"][:1]
    for document in documents[:2]:
        document["d_state"] = torch.zeros_like(inputs["d_state"][:1])

    alone = [problem.run(document, "recurrent") for document in documents]
    reference = {name: torch.cat([run[name] for run in alone], 1) for name in alone[1] if name != "final"}
    reference["final"] = alone[2]["final"]
    if "state" in inputs:
        reference["d_state"] = alone[0]["d_state"]
    for form in FORMS:
        assert_all_close(f"{form} packed", problem.run(packed, form), reference, EXACT, scales(reference))


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_document_may_begin_anywhere(decay: str) -> None:
    """Row i of the batch has a border at token i, and every other row a second one right after it."""
    T = 131
    problem = Problem(
        T, batch=T, heads=1, query_heads=1, key_heads=1, erase_heads=1, key_dim=3, value_dim=2, writes=2, decay=decay
    )
    inputs = problem.inputs()
    inputs["reset"] = torch.eye(T, dtype=torch.bool)
    inputs["reset"][::2] |= inputs["reset"][::2].roll(1, dims=1)
    reference = problem.run(inputs, "recurrent")
    for form in sorted(set(FORMS) - {"recurrent"}):
        together = problem.run(inputs, form)
        for index in range(T):  # a wrong row must not be hidden by the right ones
            expected = row(reference, index)
            assert_all_close(f"{form}, border at {index}:", row(together, index), expected, EXACT, scales(expected))


@given(problem=problems(tokens=st.integers(1, 70), mask="none", reset="none", initial=True))
@examples(15)
def test_reset_at_the_first_token_ignores_the_incoming_state(problem: Problem) -> None:
    inputs = problem.inputs()
    inputs["reset"] = torch.zeros(problem.batch, problem.tokens, dtype=torch.bool)
    inputs["reset"][:, 0] = True
    inputs["state"] = 1e6 * inputs["state"]
    fresh = {name: x for name, x in inputs.items() if name not in ("state", "reset")}
    reference = problem.run(fresh, "recurrent")
    for form in FORMS:
        got = problem.run(inputs, form)
        assert torch.count_nonzero(got.pop("d_state")) == 0, form
        assert_all_close(f"{form} fresh", got, reference, EXACT, scales(reference))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_nothing_of_a_huge_document_reaches_the_next(form: str, decay: str) -> None:
    """A border is exact: 10¹⁵ on its left leaves no rounding on its right."""
    problem = Problem(tokens=100, decay=decay, initial=False)
    inputs = problem.inputs()
    inputs["w"][:, :70] *= 1e15
    inputs["reset"] = (torch.arange(100) == 70).unsqueeze(0)
    o, final = prism.memory(problem.update(inputs), None, form)
    alone, end = prism.memory(problem.update(cut({**inputs, "reset": inputs["reset"] & False}, 70, 100, 1)), None)
    assert_close("o", o[:, 70:], alone, EXACT)
    assert_close("final", final, end, EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_an_all_padded_segment_leaves_the_state_unchanged(form: str) -> None:
    problem = Problem(tokens=70, batch=2, decay="channel", rate="strong")
    inputs = problem.inputs()
    inputs["mask"] = torch.zeros(2, 70, dtype=torch.bool)
    got = problem.run(inputs, form)
    assert torch.equal(got["final"], inputs["state"])
    assert torch.equal(got["d_state"], inputs["d_state"])
    assert torch.count_nonzero(got["o"]) == 0
