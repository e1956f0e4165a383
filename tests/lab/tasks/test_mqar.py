"""Associative recall: every question has exactly one answer, and it is in the sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.lab.tasks.mqar import FILLERS, IGNORE, PRESETS, Recall, fewer_pairs
from prism.lab.tasks.mqar_mix import RecallMix


@st.composite
def tasks(draw: st.DrawFn) -> Recall:
    pairs = draw(st.integers(1, 12))
    return Recall(
        pairs,
        4 * pairs + 2 * draw(st.integers(0, 10)),
        2 * pairs + 2 + 2 * draw(st.integers(1, 20)),
        draw(st.sampled_from(FILLERS)),
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
        elif task.filler == "noise":
            assert not set(filler) & (set(keys) | set(values) | {0})
        if task.filler != "random":  # what is asked can be read off the sequence
            region = [IGNORE] * (2 * n) + [shown.get(token, IGNORE) for token in row[2 * n :]]
            assert wanted == region


def recalled(row: list[int], wanted: list[int], latest: bool) -> list[bool]:
    """Whether a memory of pairs that keeps the first (or the latest) one under a key answers right, question by question."""
    right = []
    memory: dict[int, int] = {}
    for i, (token, answer) in enumerate(zip(row, wanted, strict=True)):
        if answer != IGNORE:
            right.append(memory.get(token) == answer)
        if i and (latest or row[i - 1] not in memory):
            memory[row[i - 1]] = token
    return right


@pytest.mark.parametrize("filler", FILLERS)
def test_the_first_pair_under_a_key_is_always_the_true_one(filler: str) -> None:
    """So the ceiling is 1 with any filler; with random filler and few tokens the latest pair often is not."""
    task = Recall(4, 64, 64, filler)
    batch = task.sample(300, torch.Generator().manual_seed(0))
    pairs = list(zip(*(part.tolist() for part in batch), strict=True))
    first, latest = (
        [right for row, wanted in pairs for right in recalled(row, wanted, late)] for late in (False, True)
    )
    assert sum(first) / len(first) == task.ceiling() == 1.0
    assert (sum(latest) / len(latest) < 0.95) == (filler == "random")


def test_random_filler_comes_from_the_whole_vocabulary() -> None:
    tokens, answers = Recall(1, 16, 16, "random").sample(2000, torch.Generator().manual_seed(0))
    filler = tokens[:, 2:][answers[:, 2:] == IGNORE]
    shares = filler.bincount(minlength=16) / len(filler)
    assert (shares - 1 / 16).abs().max() < 4 * (15 / 256 / len(filler)) ** 0.5


@pytest.mark.parametrize("task", [Recall(3, 12, 16), RecallMix(((4, 1), (20, 4)), (1, 2), (), 32)])
def test_the_baseline_answers_with_any_value_shown(task: Recall | RecallMix) -> None:
    tokens, answers = task.sample(6000, torch.Generator().manual_seed(0))
    guesses = torch.zeros_like(tokens)
    for i, wanted in enumerate(answers.tolist()):
        n = sum(answer != IGNORE for answer in wanted)
        guesses[i] = tokens[i, 1 + 2 * (i % n)]
    scores = task.score(guesses, answers)
    assert abs(scores.mean().item() - task.baseline()) < 4 * scores.std().item() / 6000**0.5 + 1e-6


def test_numbers_of_pairs_to_test_with() -> None:
    task = Recall(4, 16, 64, "noise", 0.5, test_pairs=(2, 4, 8))
    assert task.tests() == {
        "pairs=4": Recall(4, 16, 64, "noise", 0.5),
        "pairs=2": Recall(2, 16, 64, "noise", 0.5),
        "pairs=8": Recall(8, 32, 64, "noise", 0.5),
    }


def test_fewer_pairs_are_quarters_and_never_none_or_all() -> None:
    assert fewer_pairs(16) == (4, 8, 12)
    assert [fewer_pairs(n) for n in (1, 2, 3)] == [(), (1,), (1, 2)]
    assert all(task.test_pairs == fewer_pairs(task.pairs) for task in PRESETS.values())


def test_presets_have_the_published_sizes() -> None:
    sizes = [(t.length, t.pairs, t.vocabulary, t.filler) for name, t in PRESETS.items() if name.startswith("zoology")]
    assert sizes == [(n, pairs, 8192, "zeros") for n, pairs in ((64, 4), (128, 8), (256, 16), (512, 64))]
    assert list(RecallMix().tests())[1] == "length=64, pairs=4"


@given(st.integers(0, 2**31))
def test_a_mixture_holds_every_size_in_its_share(seed: int) -> None:
    mixture = RecallMix(((8, 1), (12, 2), (20, 3)), (2, 1, 1), ((40, 4),), 16, "zeros")
    tokens, answers = mixture.sample(200, torch.Generator().manual_seed(seed))
    assert tokens.shape == (200, 20)
    found = [0, 0, 0, 0]
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        n = sum(answer != IGNORE for answer in wanted)
        found[n] += 1
        length = mixture.sizes[n - 1][0]
        assert set(row[length:]) <= {0} and all(recalled(row, wanted, latest=False))
        assert len(set(row[: 2 * n : 2])) == n == sum(token > 0 for token in row[2 * n :])
    assert abs(found[1] - 100) < 5 * 50**0.5 and abs(found[2] - 50) < 5 * 37.5**0.5


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
        ({"test_pairs": (4, 0)}, "pairs"),
    ],
)
def test_settings_that_make_no_task_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Recall(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sizes": (), "weights": ()}, "weights"),
        ({"weights": (1,)}, "weights"),
        ({"weights": (1, 1, 1, 0, 1)}, "weights"),
        ({"sizes": ((8, 4),), "weights": (1,)}, "length"),
        ({"test_sizes": ((64, 4), (64, 32))}, "length"),
        ({"filler": "ones"}, "filler"),
    ],
)
def test_mixtures_that_make_no_task_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RecallMix(**arguments)
