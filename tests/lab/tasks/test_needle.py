"""Needles: a reader that looks for the mark finds the value, at any depth and length."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab.tasks import needle
from prism.lab.tasks.needle import FILLER, KEYS, MARK, QUESTION, SYMBOLS, Needle
from prism.lab.tasks.task import IGNORE


@st.composite
def tasks(draw: st.DrawFn) -> Needle:
    level, needles = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    symbols = 8 if level == 3 else 2
    return Needle(level, needles * (symbols + 2) + symbols + 1 + draw(st.integers(0, 40)), needles)


def read(row: list[int], symbols: int) -> tuple[list[int], list[int], list[int]]:
    """The answers of one sequence, its filler, and the depths of its needles (tokens of filler before each)."""
    memory: dict[int, list[int]] = {}
    filler: list[int] = []
    depths = []
    question = row.index(QUESTION)
    i = 0
    while i < question:
        if row[i] == MARK:
            memory[row[i + 1]] = row[i + 2 : i + 2 + symbols]
            depths.append(len(filler))
            i += 2 + symbols
        else:
            filler.append(row[i])
            i += 1
    value = memory[row[question + 1]]
    assert row[question + 2 :] == value[:-1]
    return [IGNORE] * (question + 1) + value, filler, depths


@given(tasks(), st.integers(0, 2**31))
def test_answers_are_the_value_under_the_asked_key(task: Needle, seed: int) -> None:
    tokens, answers = task.sample(5, torch.Generator().manual_seed(seed))
    assert tokens.shape == (5, task.length)
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        got, filler, depths = read(row, task.symbols)
        assert got == wanted and len(depths) == task.needles
        assert row.count(MARK) == task.needles and row.count(QUESTION) == 1
        keys = [row[i + 1] for i, token in enumerate(row) if token == MARK]
        assert len(set(keys)) == task.needles and set(keys) <= set(KEYS)
        assert all(symbol in SYMBOLS for symbol in got if symbol != IGNORE)
        assert all(FILLER <= token < task.vocabulary for token in filler)
        if task.level == 1:
            assert filler == [FILLER + i % 8 for i in range(len(filler))]


def test_the_markov_text_follows_its_chain() -> None:
    """Each word has five followers, the same in every sequence, with chances 6, 4, 3, 2, 1 of 16."""
    tokens, _ = Needle(2, 300).sample(300, torch.Generator().manual_seed(0))
    pairs: dict[int, list[int]] = {}
    for row in tokens.tolist():
        for word, after in itertools.pairwise(read(row, 2)[1]):
            pairs.setdefault(word, []).append(after)
    assert len(pairs) >= 60  # a chance chain need not visit every word
    chances = torch.tensor([6, 4, 3, 2, 1]) / 16
    for after in pairs.values():
        if len(after) < 800:
            continue
        counts = torch.tensor(after).bincount().sort(descending=True).values
        counts = counts[counts > 0]
        assert len(counts) == 5
        assert ((counts / len(after) - chances).abs() < 6 * (chances / len(after)).sqrt()).all()


def test_needles_lie_at_any_depth_and_any_of_them_is_asked() -> None:
    task = Needle(1, 16, 2)  # five tokens of filler
    tokens, _ = task.sample(4000, torch.Generator().manual_seed(0))
    found: dict[tuple[int, ...], int] = {}
    asked = 0
    for row in tokens.tolist():
        depths = tuple(read(row, 2)[2])
        found[depths] = found.get(depths, 0) + 1
        asked += row[row.index(MARK) + 1] == row[row.index(QUESTION) + 1]
    chance = 1 / 21  # ways to place two needles among five tokens, in order
    assert len(found) == 21
    assert max(abs(n - 4000 * chance) for n in found.values()) < 5 * (4000 * chance) ** 0.5
    assert abs(asked - 2000) < 4 * 1000**0.5


def test_a_sequence_scores_only_if_every_symbol_is_right() -> None:
    task = Needle(3, 32)
    _, targets = task.sample(4, torch.Generator().manual_seed(0))
    predictions = targets.clone()
    predictions[0, 0] += 1  # nothing is asked there
    predictions[1, -1] += 1
    predictions[2, -8:] += 1
    assert task.score(predictions, targets).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_baseline_answers_with_any_symbols() -> None:
    task = Needle(1, 8)
    _, targets = task.sample(40_000, torch.Generator().manual_seed(0))
    right = task.score(torch.full_like(targets, SYMBOLS[3]), targets).mean().item()
    assert task.baseline() == 1 / 256
    assert abs(right - task.baseline()) < 4 * (task.baseline() / 40_000) ** 0.5
    assert Needle(3).baseline() == 16.0**-8


def test_lengths_to_test_with() -> None:
    assert Needle(2).tests() == {f"length={n}": Needle(2, n) for n in (128, 256, 512, 1024)}


def test_the_chain_is_the_same_in_every_run() -> None:
    needle._followers.cache_clear()
    first = needle._followers().clone()
    torch.manual_seed(1)
    needle._followers.cache_clear()
    assert torch.equal(first, needle._followers())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"level": 0}, "level must be 1, 2 or 3, got 0"),
        ({"level": 4}, "level"),
        ({"needles": 0}, "needles"),
        ({"needles": 17}, "needles must be between 1 and 16"),
        ({"length": 6}, "length must be ≥ 7"),
        ({"level": 3, "length": 28, "needles": 2}, "length must be ≥ 29"),
    ],
)
def test_settings_that_make_no_task_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Needle(**arguments)
