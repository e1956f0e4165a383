"""Several pairs in one token: a dictionary that reads the events answers every question."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab.tasks.multi_pair import MultiPair
from prism.lab.tasks.task import IGNORE


@st.composite
def tasks(draw: st.DrawFn) -> MultiPair:
    events, pairs = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))
    return MultiPair(events, pairs, 2 * events * pairs + 2 + draw(st.integers(0, 9)))


def answer(row: list[list[int]]) -> list[int]:
    """The answers of one sequence, read token by token: an event has a value in its second place, a question has not."""
    memory: dict[int, int] = {}
    answers = []
    for token in row:
        if token[1]:
            memory.update(zip(token[0::2], token[1::2], strict=True))
        answers.append(IGNORE if token[1] else memory[token[0]])
    return answers


@given(tasks(), st.integers(0, 2**31))
def test_answers_are_what_the_events_showed(task: MultiPair, seed: int) -> None:
    tokens, answers = task.sample(5, torch.Generator().manual_seed(seed))
    n, m, half = task.events, task.pairs_per_token, task.vocabulary // 2
    assert tokens.shape == (5, n + n * m, 2 * m)
    assert [answer(row) for row in tokens.tolist()] == answers.tolist()
    for row in tokens.tolist():
        keys = [key for token in row[:n] for key in token[0::2]]
        values = [value for token in row[:n] for value in token[1::2]]
        assert len(set(keys)) == len(set(values)) == n * m
        assert all(0 < key < half for key in keys) and all(half <= value < task.vocabulary for value in values)
        assert sorted(token[0] for token in row[n:]) == sorted(keys)
        assert all(not any(token[1:]) for token in row[n:])


def test_questions_come_in_any_order() -> None:
    """Each of the 6 orders of 3 keys is equally likely, so the place of a question says nothing."""
    tokens, _ = MultiPair(3, 1, 8).sample(6000, torch.Generator().manual_seed(0))
    places = (tokens[:, 3:, 0].unsqueeze(2) == tokens[:, None, :3, 0]).int().argmax(2)
    found = (places * torch.tensor([9, 3, 1])).sum(1).bincount()
    found = found[found > 0]
    assert len(found) == 6 and (found - 1000).abs().max() < 5 * (6000 * 5 / 36) ** 0.5


def test_the_baseline_answers_with_any_value_shown() -> None:
    task = MultiPair(2, 2, 32)
    tokens, answers = task.sample(6000, torch.Generator().manual_seed(0))
    scores = task.score(tokens[:, :1, 1].expand_as(answers), answers)  # always the first value
    assert abs(scores.mean().item() - task.baseline()) < 1e-6  # every key is asked once


def test_numbers_of_events_to_test_with() -> None:
    assert list(MultiPair(8, 2, 128).tests()) == ["events=8", "events=2", "events=4", "events=16"]
    assert list(MultiPair(8, 4, 128).tests()) == ["events=8", "events=2", "events=4"]  # 63 keys do not fill 16 events
    assert list(MultiPair(1, 1, 8).tests()) == ["events=1", "events=2"]
    assert MultiPair(4, 2, 128, test_events=(3,)).tests() == {
        "events=4": MultiPair(4, 2, 128),
        "events=3": MultiPair(3, 2, 128),
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"events": 0}, "events"),
        ({"pairs_per_token": 0}, "pairs_per_token"),
        ({"events": 32, "pairs_per_token": 2}, "vocabulary must be ≥ 130"),
        ({"test_events": (4, 100)}, "vocabulary"),
    ],
)
def test_settings_that_make_no_task_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MultiPair(**arguments)
