"""Parity and modular arithmetic: every answer is what plain Python reads from the tokens."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.lab.tasks.task import IGNORE, draw, stream
from prism.lab.tasks.tracking import ModularArithmetic, Parity, Tracking

SEEDS = st.integers(0, 2**32)
PLAIN = {1: "+", 2: "-", 3: "*", 4: "=", 5: "0", 6: "1", 7: "2", 8: "3", 9: "4"}
BRACKETS = {0: "0", 1: "1", 2: "2", 3: "3", 4: "4", 5: "+", 6: "-", 7: "*", 8: "(", 9: ")", 10: "="}


def read(task: Tracking, count: int, seed: int) -> list[tuple[list[int], int, set[int]]]:
    """The tokens of every row before its padding, the answer, and the tokens after the question."""
    inputs, targets = task.sample(count, torch.Generator().manual_seed(seed))
    assert inputs.shape == targets.shape == (count, task.longest - 1)
    assert inputs.min() >= 0 and inputs.max() < task.vocabulary
    found = []
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        asked = [i for i, answer in enumerate(answers) if answer != IGNORE]
        assert len(asked) == 1
        found.append((row[: asked[0] + 1], answers[asked[0]], set(row[asked[0] + 1 :])))
    return found


@given(SEEDS, st.integers(2, 6), st.integers(0, 30))
def test_parity_counts_the_ones(seed: int, shortest: int, more: int) -> None:
    task = Parity(shortest, shortest + more)
    for tokens, answer, others in read(task, 20, seed):
        assert shortest - 1 <= len(tokens) <= shortest + more - 1
        assert set(tokens) <= {1, 2} and others <= {0}
        assert answer == tokens.count(2) % 2


@given(SEEDS)
def test_dense_parity_asks_at_every_bit(seed: int) -> None:
    inputs, targets = Parity(3, 12, dense=True).sample(10, torch.Generator().manual_seed(seed))
    for row, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        size = len(row) - row.count(0)
        assert row[size:] == [0] * (len(row) - size)
        assert answers[:size] == [row[: i + 1].count(2) % 2 for i in range(size)]
        assert answers[size:] == [IGNORE] * (len(row) - size)


@given(SEEDS, st.integers(3, 7), st.integers(0, 30), st.booleans())
def test_arithmetic_is_pythons(seed: int, shortest: int, more: int, brackets: bool) -> None:
    task = ModularArithmetic(shortest, shortest + more + 1, brackets=brackets)
    pad, names = (11, BRACKETS) if brackets else (0, PLAIN)
    for tokens, answer, others in read(task, 20, seed):
        assert pad not in tokens and others <= {pad}
        text = "".join(names[token] for token in tokens)
        assert text[-1] == "=" and shortest <= len(text) + 1 <= shortest + more + 1
        assert answer == eval(text[:-1]) % 5
        if not brackets:
            assert re.fullmatch(r"\d([-+*]\d)*=", text)


def parse(text: str) -> tuple[str, int]:
    """Read one bracketed expression from the front of the text; returns the rest and its value."""
    minus, bracketed = r"-(\d)", text.startswith("(")
    if not bracketed:
        found = re.match(rf"{minus}|(\d)", text)
        assert found is not None, text
        return text[found.end() :], -int(found[1]) if found[1] else int(found[2])
    leaf = re.match(r"\((-?)(\d)\)", text)
    if leaf:
        return text[leaf.end() :], int(leaf[1] + leaf[2])
    rest, left = parse(text[1:])
    operator = rest[0]
    rest, right = parse(rest[1:])
    assert operator in "+-" and rest[0] == ")", text
    return rest[1:], left + right if operator == "+" else left - right


@given(SEEDS)
def test_brackets_follow_the_grammar(seed: int) -> None:
    for tokens, answer, _ in read(ModularArithmetic(3, 60, brackets=True), 10, seed):
        rest, value = parse("".join(BRACKETS[token] for token in tokens))
        assert rest == "=" and value % 5 == answer


def test_brackets_split_anywhere() -> None:
    """Of length 7 there are ( l ∘ r ) with 1 + 3, 2 + 2 and 3 + 1 tokens, equally likely, and both operators."""
    counts: dict[str, int] = {}
    for tokens, _, _ in read(ModularArithmetic(9, 9, brackets=True), 3000, 0):
        shape = re.sub(r"\d", "d", "".join(BRACKETS[token] for token in tokens))
        counts[shape] = counts.get(shape, 0) + 1
    shapes = [
        f"({left}{operator}{right})=" for left, right in (("d", "(d)"), ("-d", "-d"), ("(d)", "d")) for operator in "+-"
    ]
    assert sorted(counts) == sorted(shapes)
    assert all(400 < count < 600 for count in counts.values())


@pytest.mark.parametrize("task", [Parity(3, 8), ModularArithmetic(3, 9), ModularArithmetic(3, 8, brackets=True)])
def test_sizes_are_uniform(task: Tracking) -> None:
    found = torch.tensor([len(tokens) + 1 for tokens, _, _ in read(task, 4000, 0)]).bincount()
    sizes = found.nonzero().flatten().tolist()
    assert sizes == list(task.sizes(task.shortest, task.longest))
    assert (found[sizes] * len(sizes) / 4000 - 1).abs().max() < 0.2


@pytest.mark.parametrize(
    "task",
    [Parity(), Parity(dense=True), ModularArithmetic(), ModularArithmetic(3, 6), ModularArithmetic(brackets=True)],
)
def test_baseline_is_the_best_constant_answer(task: Tracking) -> None:
    inputs, targets = task.sample(20_000, torch.Generator().manual_seed(0))
    scores = [float(task.score(torch.full_like(inputs, i), targets).mean()) for i in range(task.answers)]
    assert max(scores) == pytest.approx(task.baseline(), abs=0.02)
    assert scores[0] == pytest.approx(task.baseline(), abs=0.02)
    assert float(task.score(targets, targets).mean()) == task.ceiling() == 1


def test_products_favour_zero() -> None:
    """Of size 5, a third of the expressions is d * d, which is 0 in 9 of 25 cases."""
    assert ModularArithmetic(5, 5).baseline() == pytest.approx(((2 / 5 + 9 / 25) / 3 - 1 / 5) / (4 / 5))


def test_scores_are_scaled() -> None:
    targets = torch.tensor([[IGNORE, 1, IGNORE], [IGNORE, IGNORE, 0]])
    assert Parity().score(torch.ones_like(targets), targets).tolist() == [1, -1]
    assert ModularArithmetic().score(torch.ones_like(targets), targets).tolist() == pytest.approx([1, -0.25])


def test_tests_are_longer_and_ask_once() -> None:
    assert Parity(dense=True).tests() == {"40-256": Parity(40, 256), "3-40": Parity()}
    assert list(ModularArithmetic(test_longest=80, brackets=True).tests()) == ["40-80", "3-40"]


@settings(max_examples=20)
@given(SEEDS)
def test_long_tests_are_right_too(seed: int) -> None:
    task = ModularArithmetic(brackets=True).tests()["40-256"]
    assert isinstance(task, Tracking)
    for tokens, answer, _ in read(task, 2, seed):
        assert 39 <= len(tokens) <= 255
        assert parse("".join(BRACKETS[token] for token in tokens))[1] % 5 == answer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shortest": 2}, "shortest must be ≥ 3 for task 'modular', got 2"),
        ({"shortest": 8, "longest": 8}, "no size from shortest = 8 to longest = 8: raise longest"),
        ({"test_shortest": 9, "test_longest": 5}, "no size from test_shortest = 9 to test_longest = 5"),
    ],
)
def test_bad_sizes_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModularArithmetic(**settings)  # type: ignore[arg-type]
    assert ModularArithmetic(8, 8, brackets=True) and Parity(2, 2)


@pytest.mark.parametrize(
    "task", [Parity(3, 6, 3, 9), ModularArithmetic(3, 7, 3, 9), ModularArithmetic(3, 6, 3, 9, True)]
)
def test_a_sequence_has_one_split_whatever_its_padding(task: Tracking) -> None:
    """Tests have longer sizes than training, so that a short sequence has more padding there."""
    pad = 11 if task.vocabulary == 12 else 0
    splits = []
    for name, split in (("", "train"), ("3-9", "test")):
        one = task.tests()[name] if name else task
        inputs = draw(one, 600, split, stream(split, 0)).inputs.tolist()
        splits.append({tuple(token for token in row if token != pad) for row in inputs})
    assert splits[0] and splits[1] and not splits[0] & splits[1]
