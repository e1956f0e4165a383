"""Synthetic tasks: no split shares a sample, streams are their own, and every task keeps the interface's promises."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from prism.lab.tasks.catalogue import TASKS as NAMES
from prism.lab.tasks.catalogue import task_class
from prism.lab.tasks.groups import GroupWords
from prism.lab.tasks.mqar import FILLERS, Recall
from prism.lab.tasks.mqar_mix import RecallMix
from prism.lab.tasks.multi_pair import MultiPair
from prism.lab.tasks.needle import Needle
from prism.lab.tasks.nine import KINDS, MODES, NineProbes
from prism.lab.tasks.regression import Regression
from prism.lab.tasks.task import IGNORE, SHARES, Batch, Task, draw, hash_rows, stream
from prism.lab.tasks.tracking import ModularArithmetic, Parity

TASKS = st.one_of(
    st.builds(Recall, st.integers(1, 3), st.sampled_from([12, 14]), st.sampled_from([8, 30]), st.sampled_from(FILLERS)),
    st.builds(RecallMix, st.just(((4, 1), (10, 2))), st.just((1, 3)), st.just(((12, 3),)), st.just(10)),
    st.builds(MultiPair, st.integers(1, 3), st.integers(1, 3), st.sampled_from([20, 41])),
    st.builds(Needle, st.integers(1, 3), st.integers(38, 50), st.integers(1, 2)),
    st.builds(Regression, st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.floats(0, 2)),
    st.builds(Parity),
    st.builds(ModularArithmetic, brackets=st.booleans()),
    st.builds(GroupWords, st.sampled_from(["Z2", "S3", "A5"]), st.integers(16, 20)),
    st.builds(NineProbes, st.sampled_from(KINDS), st.sampled_from(MODES)),
)


@dataclass(frozen=True)
class Words(Task):
    """Random tokens 1 … symbols; there are only symbols ** length different sequences."""

    name: ClassVar[str] = "words"
    length: int = 3
    symbols: int = 2

    @property
    def vocabulary(self) -> int:
        return self.symbols + 1

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(1, self.symbols + 1, (count, self.length), generator=generator)
        return Batch(tokens, tokens)

    def baseline(self) -> float:
        return 1 / self.symbols


SMALL = st.one_of(
    st.builds(Words, st.integers(3, 8), st.integers(2, 3)),
    st.builds(Recall, st.just(1), st.sampled_from([4, 6, 8]), st.sampled_from([8, 10])),
    st.builds(MultiPair, st.integers(1, 2), st.integers(1, 2), st.just(10)),
    st.builds(RecallMix, st.just(((4, 1), (6, 1))), st.just((1, 1)), st.just(()), st.just(8), st.just("zeros")),
)
"""Tasks of so few sequences that independent draws would share many."""


def rows(batch: Batch) -> set[tuple[float, ...]]:
    return {tuple(row) for row in batch.inputs.flatten(1).tolist()}


@given(st.one_of(SMALL, TASKS), st.integers(0, 2**31))
def test_no_split_shares_a_sample(task: Task, seed: int) -> None:
    seen: dict[str, set[tuple[float, ...]]] = {}
    for split in SHARES:
        generator = torch.Generator().manual_seed(seed)  # not even where all splits draw the same numbers
        try:
            batch = draw(task, 40, split, generator)
        except ValueError:
            assume(False)
        assert len(batch.inputs) == len(batch.targets) == 40
        seen[split] = rows(batch)
    assert not seen["train"] & seen["validation"] and not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


def test_a_split_gets_all_its_sequences_and_together_they_are_everything() -> None:
    found = {split: rows(draw(Words(5, 2), 2000, split, stream(split, 0))) for split in SHARES}
    assert sum(map(len, found.values())) == 2**5


def test_padding_does_not_change_the_split() -> None:
    """The test sequences of a mixture are not among its padded training sequences."""
    mixture = RecallMix(((4, 1), (6, 1)), (1, 1), ((4, 1),), 8, "zeros")
    train = rows(draw(mixture, 200, "train", stream("train", 0)))
    (part,) = list(mixture.tests().values())[1:]
    test = {(*row, 0.0, 0.0) for row in rows(draw(part, 200, "test", stream("test", 0)))}
    assert len(test) > 1 and not train & test


def test_streams_differ_by_split_seed_and_name() -> None:
    names = [(split, seed, name) for split in SHARES for seed in range(3) for name in ("", "a", "1")]
    numbers = {torch.randint(2**62, (1,), generator=stream(*name)).item() for name in names}
    assert len(numbers) == len(names)
    assert torch.equal(*(torch.rand(3, generator=stream("test", 1, "a")) for _ in range(2)))


@given(st.data(), st.lists(st.integers(0, 2**40), min_size=2, max_size=20))
def test_the_hash_depends_on_every_value_and_its_place(data: st.DataObject, row: list[int]) -> None:
    place, other = data.draw(st.permutations(range(len(row))))[:2]
    changed, swapped = list(row), list(row)
    changed[place] += data.draw(st.integers(1, 2**20))
    swapped[place], swapped[other] = row[other], row[place]
    hashes = hash_rows(torch.tensor([row, changed, swapped, row])).tolist()
    assert hashes[0] == hashes[3] != hashes[1]
    assert (hashes[0] == hashes[2]) == (row[place] == row[other])
    assert min(hashes) >= 0


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=8, unique_by=abs))
def test_numbers_are_hashed_by_value(row: list[float]) -> None:
    numbers = torch.tensor([row, [-x for x in row], row[::-1]])
    first, negated, turned = hash_rows(numbers).tolist()
    assert first != negated and first != turned
    assert hash_rows(torch.tensor([[0.0, 1.0], [-0.0, 1.0]])).unique().numel() == 1


@pytest.mark.parametrize("order", ["bits", "numbers"])
def test_splits_have_their_shares_whatever_the_answer(order: str) -> None:
    """Half, a quarter, a quarter of all sequences; also of those with an even sum, so no split is easier."""
    if order == "bits":
        sequences = torch.cartesian_prod(*[torch.tensor([1, 2])] * 13)
    else:
        sequences = torch.randn(8192, 3, generator=torch.Generator().manual_seed(0))
    remainder = hash_rows(sequences) % 4
    even = sequences.sum(1).round().long() % 2 == 0
    for chosen in (remainder, remainder[even], remainder[~even]):
        for share in (chosen.bincount(minlength=4) / len(chosen)).tolist():
            assert abs(share - 0.25) < 4 * (0.1875 / len(chosen)) ** 0.5


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_too_small_a_task_raises(split: str) -> None:
    """Of one possible sequence two splits have none."""
    only = int(hash_rows(torch.ones(1, 2, dtype=torch.long)).item() % 4)
    low, high = SHARES[split]
    if low <= only < high:
        assert len(draw(Words(2, 1), 5, split, stream(split, 0)).inputs) == 5
    else:
        with pytest.raises(ValueError, match=f"'words' has too few .* {split!r}: make them longer"):
            draw(Words(2, 1), 5, split, stream(split, 0))


@given(TASKS, st.integers(0, 2**31))
def test_every_task_keeps_what_the_interface_says(task: Task, seed: int) -> None:
    inputs, targets = task.sample(6, torch.Generator().manual_seed(seed))
    again = task.sample(6, torch.Generator().manual_seed(seed))
    assert torch.equal(inputs, again.inputs)
    if inputs.is_floating_point():
        assert inputs.shape[2] == task.vocabulary and targets.shape == (*inputs.shape[:2], task.answers)
        asked = ~targets.isnan()
    else:
        asked = targets != IGNORE
        assert targets.shape == inputs.shape[:2] and inputs.dtype == targets.dtype == torch.long
        assert inputs.min() >= 0 and inputs.max() < task.vocabulary
        assert targets[asked].min() >= 0 and targets[asked].max() < task.answers
    assert asked.flatten(1).any(1).all()
    # Arbitrary predictions where nothing is asked do not matter.
    right = torch.where(asked, targets, 7)
    torch.testing.assert_close(task.score(right, targets), torch.ones(6))
    assert (task.score(torch.where(asked, targets + 1, 7), targets) < 0.5).all()
    assert task.baseline() <= task.ceiling() <= 1.0
    tests = list(task.tests().values())
    assert tests[0].sample(1, stream("test", 0)).inputs.shape[2:] == inputs.shape[2:]
    assert {(test.vocabulary, test.answers, test.metric) for test in tests} == {
        (task.vocabulary, task.answers, task.metric)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_tasks_draw_on_the_gpu(name: str) -> None:
    task = task_class(name)()
    batch = draw(task, 4, "train", stream("train", 0, device="cuda"))
    assert batch.inputs.is_cuda and batch.targets.is_cuda
    assert len(draw(task, 4, "train", stream("train", 0)).inputs) == 4  # nothing kept from the GPU is used
