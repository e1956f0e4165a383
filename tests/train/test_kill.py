"""A run that is killed, again and again, ends as if nothing had happened: the same losses, weights and random state."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.children import final_tensors, finish, kill_when, reached, same_tensors
from tests.train.runs import losses, small, start
from tests.train.standin import build_with_dropout


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_three_times_and_resumed_is_bit_identical(tmp_path: Path, processes: int) -> None:
    parallel = {"parallel": "none" if processes == 1 else "ddp"}
    calm = small(tmp_path / "calm", **parallel)
    assert finish(start(calm, build_with_dropout, processes)) == [0] * processes

    hunted = small(tmp_path / "hunted", **parallel)
    shard = tmp_path / "hunted" / "cache" / "tokens"
    chance = random.Random(processes)
    moments = {
        "tokens": lambda: any(shard.glob(".*.partial/train-*.bin")),
        "steps, before the first checkpoint": reached(hunted.out, 2),
        "steps, after it": reached(hunted.out, chance.randrange(7, 22)),
    }
    for where, moment in moments.items():
        kill_when(start(hunted, build_with_dropout, processes, slow=where.partition(",")[0]), moment)
    assert finish(start(hunted, build_with_dropout, processes)) == [0] * processes

    assert losses(hunted.out) == losses(calm.out)
    assert len(losses(calm.out)) == 24 + 3
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm.out))


def test_the_comparison_above_can_fail(tmp_path: Path) -> None:
    one, other = small(tmp_path / "a"), small(tmp_path / "b", seed=1)
    assert finish([*start(one, build_with_dropout), *start(other, build_with_dropout)]) == [0, 0]
    assert losses(one.out) != losses(other.out)
    assert not same_tensors(final_tensors(one.out), final_tensors(other.out))
