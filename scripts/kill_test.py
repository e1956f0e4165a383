"""Kill a training run with SIGKILL at many random moments, and check that it ends as an undisturbed run does.

    python scripts/kill_test.py                    # 20 kills, one process
    python scripts/kill_test.py --processes 2      # the same with two processes (gloo, FSDP2)

Trains a small PRISM on the CPU in float32, once undisturbed and once with kills: the first kill comes while the text is
tokenized, the second before the first checkpoint, the others at random steps plus a random delay, so that some hit
validations, checkpoints and restarts. Losses, validation scores, weights, optimiser and random state must be bit-identical.
The tests do the same with three kills.
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
        kills: Number of kills.
        processes: Number of training processes.
        seed: Seed of the moments of the kills.
        steps: Training steps.
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
        undisturbed, killed = (small(root / kind, **changes) for kind in ("undisturbed", "killed"))
        assert finish(start(undisturbed, build_model, processes)) == [0] * processes
        tokens = root / "killed" / "cache" / "tokens"
        for number in range(kills):
            if number == 0:
                when, moment = "during tokenization", lambda: any(tokens.glob(".*.partial/train-*.bin"))
            else:
                step = 1 if number == 1 else round((number - 1 + chance.random()) * 0.95 * steps / kills)
                when, moment = f"from step {step} on", _after(reached(killed.out, step), chance.uniform(0, 0.1))
            kill_when(start(killed, build_model, processes, slow="steps" if number else "tokens"), moment)
            records = read_log(killed.out / "log.jsonl")
            last = records[-1]["step"] if records else 0
            print(f"kill {number + 1:2d} {when}: the log ends at step {last}", flush=True)
        assert finish(start(killed, build_model, processes)) == [0] * processes
        same = (
            losses(killed.out) == losses(undisturbed.out),
            same_tensors(final_tensors(killed.out), final_tensors(undisturbed.out)),
        )
        print(
            f"{kills} kills, {processes} process(es), {steps} steps: "
            f"losses identical: {same[0]}, tensors identical: {same[1]}"
        )
        return 0 if all(same) else 1


def _after(moment, seconds: float):
    """A condition that becomes true `seconds` after `moment` does."""
    since: list[float] = []

    def reached_since() -> bool:
        if not since and moment():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return reached_since


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
