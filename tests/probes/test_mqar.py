"""Associative recall: every question has exactly one answer, and it is in the sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.probes.mqar import IGNORE, Recall


@st.composite
def tasks(draw: st.DrawFn) -> Recall:
    pairs = draw(st.integers(1, 12))
    return Recall(
        pairs,
        4 * pairs + 2 * draw(st.integers(0, 10)),
        2 * pairs + 2 + 2 * draw(st.integers(1, 20)),
        draw(st.sampled_from(["zeros", "noise"])),
    )


@given(tasks(), st.integers(0, 2**31))
def test_answers_are_what_the_sequence_showed(task: Recall, seed: int) -> None:
    tokens, answers = task.sample(5, torch.Generator().manual_seed(seed))
    n, half = task.pairs, task.vocabulary // 2
    assert tokens.shape == answers.shape == (5, task.length)
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert len(set(keys)) == len(set(values)) == n
        assert all(0 < key < half for key in keys)
        assert all(half <= value < task.vocabulary for value in values)
        shown = dict(zip(keys, values, strict=True))
        asked = [i for i, answer in enumerate(wanted) if answer != IGNORE]
        assert sorted(row[i] for i in asked) == sorted(keys)
        assert all(i >= 2 * n and i % 2 == 0 and wanted[i] == shown[row[i]] for i in asked)
        filler = [token for i, token in enumerate(row[2 * n :], 2 * n) if i not in asked]
        if task.filler == "zeros":
            assert set(filler) <= {0}
        else:
            assert not set(filler) & (set(keys) | set(values) | {0})


def test_the_same_seed_gives_the_same_data_and_another_seed_other_data() -> None:
    task = Recall()
    first, again, other = (task.sample(4, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_near_questions_are_likelier() -> None:
    task = Recall(pairs=1, length=42, vocabulary=8)
    _, answers = task.sample(2000, torch.Generator().manual_seed(0))
    gaps = ((answers != IGNORE).int().argmax(1) - 2) // 2
    # p(0) = 1 / Σ_{g<20} (g+1)^{-0.99} = .275; four standard errors are .04
    assert abs((gaps == 0).float().mean().item() - 0.275) < 0.04


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pairs": 0}, "pairs"),
        ({"pairs": 16, "length": 62}, "length"),
        ({"pairs": 4, "length": 17}, "length"),
        ({"pairs": 16, "vocabulary": 20}, "vocabulary"),
        ({"filler": "ones"}, "filler"),
    ],
)
def test_settings_that_make_no_task_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Recall(**arguments)
