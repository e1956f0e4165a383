"""Tokens a second of several trainings side by side on one device: how many processes does a comparison need?

    python benchmarks/side_by_side.py --processes 1 2 4 6 --seconds 0.6

Every process trains its own small language model on random tokens with the product's steps (`prism.lab.text`). A line has
the tokens a second of all processes together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 1, "intermediate_size": 128},
    "15m": {"hidden_size": 384, "num_hidden_layers": 8, "num_heads": 3, "intermediate_size": 768},
    "30m": {"hidden_size": 512, "num_hidden_layers": 8, "num_heads": 4},
}
KEY_DIM, VALUE_DIM = 64, 128
CONTEXT, VOCABULARY = 1024, 8192


def settings(size: str, rule: str, batch: int, graph: bool, data: Path, device: str) -> dict[str, Any]:
    """The settings of a training."""
    options = {rule: {"key_dim": KEY_DIM, "value_dim": VALUE_DIM}}
    model = {**SIZES[size], "layers": rule, "rule_options": options}
    context = 64 if size == "tiny" else CONTEXT
    return {
        "data": str(data),
        "model": model,
        "steps": 10_000,
        "learning_rate": 1e-3,
        "batch": batch,
        "context": context,
        "graph": graph,
        "device": device,
    }


def serve(connection: Any) -> None:
    """Prepare trainings and make steps, as the parent asks."""
    import numpy as np
    import torch

    from prism.lab.text import TextRun, prepare
    from prism.language.corpus import open_corpus
    from prism.train.loop import HostCopy
    from prism.train.step import Step

    torch.set_num_threads(1)
    number, run, task, stepper = 0, None, None, None

    def advance(until: float) -> int:
        """Make steps until a time, one queued ahead; returns their number."""
        nonlocal number
        assert run is not None and task is not None and stepper is not None
        first, waiting = number, None
        while waiting is None or time.time() < until:
            chosen = np.arange(number * run.batch, (number + 1) * run.batch)
            step = Step(number + 1, task.samples(chosen, stepper.world.device), task.weight(chosen), 0.0)
            queued = HostCopy(stepper.compute(step, 0.1, False, True))
            if waiting is not None:
                waiting.read()
            waiting, number = queued, number + 1
        waiting.read()
        return number - first

    while (order := connection.recv()) is not None:
        what, value = order
        if what == "prepare":
            task = stepper = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            run = TextRun.of(value)
            task, stepper = prepare(run, open_corpus(Path(run.data), verify=False))
            number = 0
            for _ in range(3):  # kernels are compiled, a graph is captured
                advance(0.0)
            connection.send(None)
        else:
            start, until = value
            time.sleep(max(0.0, start - time.time()))
            begun = time.time()
            steps = advance(until)
            connection.send((steps * run.batch * run.context, time.time() - begun))  # type: ignore[union-attr]


def random_corpus(folder: Path) -> None:
    """Prepared tokens without meaning."""
    import hashlib

    import numpy as np

    from prism.language.tokens import Manifest, Shard, Split

    tokens = np.random.default_rng(0).integers(1, VOCABULARY, 4_000_000).astype("<u2")
    (folder / "train.bin").write_bytes(tokens.tobytes())
    shard = Shard("train.bin", len(tokens), hashlib.sha256(tokens.tobytes()).hexdigest())
    cut = len(tokens) - 100_000
    splits = {"train": Split("train", 0, cut, 1, cut), "validation": Split("train", cut, len(tokens), 1, 100_000)}
    Manifest("<u2", VOCABULARY, 0, "<|end|>", "", {"train": [shard]}, splits).save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["15m:prism:32", "30m:prism:32"], help="size:rule:batch[:graph]")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 6])
    parser.add_argument("--seconds", type=float, default=0.6, help="of a measurement")
    parser.add_argument("--budget", type=float, default=80, help="seconds after which no case is begun")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    began = time.time()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for _ in range(max(given.processes)):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        random_corpus(Path(folder))
        for case in given.cases:
            if time.time() - began > given.budget:
                print(f"{case}: no time left")
                continue
            size, rule, batch, *graph = case.split(":")
            chosen = settings(size, rule, int(batch), bool(graph), Path(folder), given.device)
            for part in (pipes[:1], pipes[1:]):  # the first compiles kernels, the others find them
                for pipe in part:
                    pipe.send(("prepare", chosen))
                for pipe in part:
                    pipe.recv()
            line = []
            for count in given.processes:
                start = time.time() + 0.05
                for pipe in pipes[:count]:
                    pipe.send(("go", (start, start + given.seconds)))
                found = [pipe.recv() for pipe in pipes[:count]]
                line.append(f"{count}: {sum(tokens / seconds for tokens, seconds in found) / 1e3:.0f}")
            print(f"{case:26s} K tokens/s  {'  '.join(line)}   ({time.time() - began:.0f} s)", flush=True)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(10)


if __name__ == "__main__":
    main()
