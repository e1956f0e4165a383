"""Regression in context: without noise the examples give the map exactly, with noise ridge regression is the ceiling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prism.lab.tasks.regression import Regression


def solve(matrix: list[list[float]], sides: list[list[float]]) -> list[list[float]]:
    """X of `matrix` X = `sides`, by Gauss-Jordan elimination with the largest pivot."""
    rows = [[*left, *right] for left, right in zip(matrix, sides, strict=True)]
    n = len(rows)
    for i in range(n):
        best = max(range(i, n), key=lambda j: abs(rows[j][i]))
        rows[i], rows[best] = rows[best], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(n):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[n:] for row in rows]


def answer(row: list[list[float]], features: int, penalty: float) -> list[list[float]]:
    """The answers to one sequence's questions: ridge regression on its examples, (XᵀX + penalty) W = XᵀY."""
    examples = [token for token in row if token[-1] == 0]
    x, y = [token[:features] for token in examples], [token[features:-1] for token in examples]
    gram = [
        [sum(t[i] * t[j] for t in x) + (penalty if i == j else 0) for j in range(features)] for i in range(features)
    ]
    cross = [[sum(t[i] * u[e] for t, u in zip(x, y, strict=True)) for e in range(len(y[0]))] for i in range(features)]
    maps = solve(gram, cross)
    return [
        [sum(token[i] * maps[i][e] for i in range(features)) for e in range(len(y[0]))]
        for token in row
        if token[-1] == 1
    ]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_without_noise_the_examples_give_the_map(features: int, outputs: int, questions: int, seed: int) -> None:
    task = Regression(features, outputs, features + 6, questions, noise=0.0)
    inputs, targets = task.sample(3, torch.Generator().manual_seed(seed))
    n = task.examples
    assert inputs.shape == (3, task.length, features + outputs + 1) and targets.shape == (3, task.length, outputs)
    assert targets[:, :n].isnan().all()
    torch.testing.assert_close(inputs[..., :features].norm(dim=2), torch.full((3, task.length), features**0.5))
    assert not inputs[:, :n, -1].any() and (inputs[:, n:, -1] == 1).all()
    assert not inputs[:, n:, features:-1].any()
    for row, wanted in zip(inputs.double().tolist(), targets[:, n:].double(), strict=True):
        torch.testing.assert_close(torch.tensor(answer(row, features, 0.0)), wanted.float(), rtol=1e-2, atol=1e-3)


def ridge(task: Regression, inputs: Tensor) -> Tensor:
    """Predictions at every token `[B, T, E]` of ridge regression on the examples; NaN at none."""
    x, y = inputs[:, : task.examples, : task.features].double(), inputs[:, : task.examples, task.features : -1].double()
    penalty = task.features * task.noise**2 + 1e-9
    gram = x.mT @ x + penalty * torch.eye(task.features)
    return (inputs[..., : task.features].double() @ torch.linalg.solve(gram, x.mT @ y)).float()


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("examples", [2, 12])
def test_the_ceiling_is_the_score_of_ridge_regression(noise: float, examples: int) -> None:
    task = Regression(4, 2, examples, 2, noise)
    inputs, targets = task.sample(4000, torch.Generator().manual_seed(1))
    scores = task.score(ridge(task, inputs), targets)
    error = scores.std().item() / 4000**0.5
    assert abs(scores.mean().item() - task.ceiling()) < 4 * error + 1e-4
    if noise:  # any other penalty does worse
        other = Regression(4, 2, examples, 2, 4 * noise)
        assert task.score(ridge(other, inputs), targets).mean() < scores.mean()


def test_plain_and_fast_ridge_regression_agree() -> None:
    task = Regression(3, 2, 8, 2, 0.5)
    inputs, _ = task.sample(3, torch.Generator().manual_seed(0))
    for row, wanted in zip(inputs.double().tolist(), ridge(task, inputs)[:, task.examples :], strict=True):
        torch.testing.assert_close(torch.tensor(answer(row, 3, 3 * 0.25)), wanted, rtol=1e-4, atol=1e-5)


def test_answers_have_variance_1_and_examples_the_noise() -> None:
    task = Regression(1, 1, 1, 1, noise=0.7)
    inputs, targets = task.sample(20_000, torch.Generator().manual_seed(0))
    maps = targets[:, 1, 0] / inputs[:, 1, 0]
    noise = inputs[:, 0, 1] - maps * inputs[:, 0, 0]
    usual = inputs[:, 1, 0].abs() > 0.1  # elsewhere the quotient is inexact
    assert abs(noise[usual].std().item() - 0.7) < 0.02
    wide = Regression(32, 4, 1, 1).sample(5000, torch.Generator().manual_seed(0)).targets[:, 1]
    assert abs(wide.square().mean().item() - 1) < 0.05


def test_the_baseline_answers_0() -> None:
    task = Regression(8, 4, 2, 4)
    _, targets = task.sample(5000, torch.Generator().manual_seed(0))
    scores = task.score(torch.zeros_like(targets), targets)
    assert abs(scores.mean().item() - task.baseline()) < 4 * scores.std().item() / 5000**0.5


def test_a_score_is_1_minus_the_mean_squared_error() -> None:
    nan = math.nan
    targets = torch.tensor([[[nan, nan], [1.0, 2.0], [3.0, 4.0]]])
    predictions = torch.tensor([[[9.0, nan], [1.0, 2.5], [2.0, 4.0]]])
    assert Regression().score(predictions, targets).tolist() == [1 - 1.25 / 4]


def test_the_ceiling_rises_with_the_examples_and_falls_with_the_noise() -> None:
    ceilings = [Regression(examples=n).ceiling() for n in (1, 4, 16, 64)]
    assert ceilings == sorted(ceilings) and ceilings[0] > 0
    assert Regression(noise=1.0).ceiling() < Regression(noise=0.1).ceiling() < 1


def test_numbers_of_examples_to_test_with() -> None:
    assert list(Regression(examples=8).tests()) == ["examples=8", "examples=2", "examples=4", "examples=16"]
    assert list(Regression(examples=1).tests()) == ["examples=1", "examples=2"]
    assert list(Regression(examples=3, test_examples=(5,)).tests().values()) == [
        Regression(examples=3),
        Regression(examples=5),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"features": 0}, "features"),
        ({"outputs": 0}, "outputs"),
        ({"examples": 0}, "examples"),
        ({"questions": 0}, "questions"),
        ({"noise": -1.0}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"noise": math.inf}, "noise"),
        ({"test_examples": (0,)}, "examples"),
    ],
)
def test_settings_that_make_no_task_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Regression(**arguments)
