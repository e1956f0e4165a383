"""Kill a training run with SIGKILL at many random moments and show that it ends as if nothing had happened.

    python scripts/kill_test.py                    20 kills, one process
    python scripts/kill_test.py --processes 2      the same with two (gloo, FSDP2)

A small PRISM is trained on the CPU in float32, once undisturbed and once hunted: the first kill falls while tokens are
made, the second before the first checkpoint, the others at random steps plus a random delay, so that they also fall
into validations, checkpoints and restarts. Losses, validation scores, weights, optimiser and random state must come out
bit-identical. The tests do the same with three kills.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prism.language.model import build_model
from prism.train.run import read_log
from tests.children import final_tensors, finish, kill_when, reached, same_tensors
from tests.train.runs import losses, small, start


def main(kills: int = 20, processes: int = 1, seed: int = 0, steps: int = 200) -> int:
    """Compare an undisturbed run with one that is killed.

    Args:
        kills: how many times.
        processes: that train together.
        seed: of the moments.
        steps: of the run.
    """
    chance = random.Random(seed)
    model = {"layers": "prism", "hidden_size": 32, "num_heads": 2, "head_dim": 16}
    changes = {
        "steps": steps,
        "model": model,
        "checkpoint": {"every": 3},
        "parallel": "none" if processes == 1 else "fsdp",
    }
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        calm, hunted = (small(root / kind, **changes) for kind in ("calm", "hunted"))
        assert finish(start(calm, build_model, processes)) == [0] * processes
        tokens = root / "hunted" / "cache" / "tokens"
        for number in range(kills):
            if number == 0:
                what, moment = "while tokens were made", lambda: any(tokens.glob(".*.partial/train-*.bin"))
            else:
                step = 1 if number == 1 else round((number - 1 + chance.random()) * 0.95 * steps / kills)
                what, moment = f"from step {step} on", _after(reached(hunted.out, step), chance.uniform(0, 0.1))
            kill_when(start(hunted, build_model, processes, slow="steps" if number else "tokens"), moment)
            records = read_log(hunted.out / "log.jsonl")
            print(
                f"kill {number + 1:2d} {what}: the log ends at step {records[-1]['step'] if records else 0}", flush=True
            )
        assert finish(start(hunted, build_model, processes)) == [0] * processes
        same = losses(hunted.out) == losses(calm.out), same_tensors(final_tensors(hunted.out), final_tensors(calm.out))
        print(
            f"{kills} kills, {processes} process(es), {steps} steps: losses identical: {same[0]}, tensors identical: {same[1]}"
        )
        return 0 if all(same) else 1


def _after(moment, seconds: float):
    """The moment, and a while more."""
    since: list[float] = []

    def come() -> bool:
        if not since and moment():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return come


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
