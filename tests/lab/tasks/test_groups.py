"""Group words: the tables are groups, and the answers are products of permutations."""

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab.tasks.groups import GROUPS, GroupWords, elements, product_table
from prism.lab.tasks.task import IGNORE

ORDERS = {"Z2": 2, "Z3": 3, "S3": 6, "S4": 24, "A5": 60, "S5": 120}
ABELIAN = {"Z2", "Z3"}


def permutations(group: str) -> list[tuple[int, ...]]:
    """The elements from the definition: rotations, all permutations, or those with an even number of inversions."""
    n = int(group[1])
    every = list(itertools.permutations(range(n)))
    if group[0] == "Z":
        return [p for p in every if all((p[i] - p[0]) % n == i for i in range(n))]
    inversions = [sum(p[i] > p[j] for i in range(n) for j in range(i + 1, n)) for p in every]
    return [p for p, number in zip(every, inversions, strict=True) if group[0] == "S" or number % 2 == 0]


@pytest.mark.parametrize("group", GROUPS)
def test_tables_are_groups(group: str) -> None:
    table, size = product_table(group), ORDERS[group]
    every = torch.arange(size)
    assert [tuple(row) for row in elements(group).tolist()] == permutations(group)
    assert table.shape == (size, size)
    for rows in (table, table.T):  # closed, and every element has an inverse on both sides
        assert torch.equal(rows.sort(1).values, every.expand(size, size))
    assert torch.equal(table[0], every) and torch.equal(table[:, 0], every)
    assert torch.equal(table[table], table[every[:, None, None], table[None]])  # (a b) c = a (b c)
    assert torch.equal(table, table.T) == (group in ABELIAN)


@given(st.sampled_from(GROUPS), st.integers(1, 20), st.integers(0, 2**32))
def test_answers_are_running_products(group: str, length: int, seed: int) -> None:
    task, names = GroupWords(group, length), permutations(group)
    inputs, targets = task.sample(4, torch.Generator().manual_seed(seed))
    assert inputs.shape == targets.shape == (4, length + 1)
    assert (inputs[:, 0] == ORDERS[group]).all() and (targets[:, 0] == IGNORE).all()
    assert task.vocabulary == ORDERS[group] + 1 and task.answers == ORDERS[group]
    for row, answers in zip(inputs[:, 1:].tolist(), targets[:, 1:].tolist(), strict=True):
        product = tuple(range(int(group[1])))
        for token, answer in zip(row, answers, strict=True):
            product = tuple(product[names[token][x]] for x in range(len(product)))
            assert names.index(product) == answer


def test_elements_and_products_are_uniform() -> None:
    inputs, targets = GroupWords("S3", 8).sample(6000, torch.Generator().manual_seed(0))
    for tokens in (inputs[:, 1], inputs[:, 8], targets[:, 8]):
        assert ((tokens.bincount(minlength=6) / 1000 - 1).abs() < 0.15).all()


def test_a_sequence_counts_only_if_all_of_it_is_right() -> None:
    task = GroupWords("Z3", 4)
    targets = torch.tensor([[IGNORE, 0, 1, 2, 0]]).repeat(4, 1)
    answers = torch.tensor([[7, 0, 1, 2, 0], [0, 0, 1, 2, 1], [0, 0, 0, 2, 0], [0, 1, 1, 2, 0]])
    assert task.score(answers, targets).tolist() == [1, 0, 0, 0]
    assert task.curve(answers, targets).tolist() == [0.75, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(("group", "length"), [("Z2", 3), ("S3", 1), ("S3", 2)])
def test_baseline_is_the_best_fixed_answer(group: str, length: int) -> None:
    task = GroupWords(group, length)
    _, targets = task.sample(20_000, torch.Generator().manual_seed(0))
    _, counts = targets[:, 1:].unique(dim=0, return_counts=True)
    assert float(counts.max()) / 20_000 == pytest.approx(task.baseline(), abs=0.01)
    assert float(task.score(targets, targets).mean()) == task.ceiling() == 1


def test_tests_are_longer() -> None:
    assert [(name, task) for name, task in GroupWords("S3", 8).tests().items()] == [
        ("32", GroupWords("S3", 32)),
        ("16", GroupWords("S3", 16)),
        ("8", GroupWords("S3", 8)),
    ]
    assert list(GroupWords(test_lengths=(512, 40)).tests()) == ["512", "40"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": "A4"}, "group must be one of Z2, Z3, S3, S4, A5, S5, got 'A4'"),
        ({"length": 0}, "length must be ≥ 1, got 0"),
        ({"test_lengths": (4, -1)}, "test_lengths must be ≥ 1, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GroupWords(**settings)
