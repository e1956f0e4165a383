"""Small runs, in this process or in children that can be killed.

Children come from a fork server that has imported everything once: starting one takes milliseconds, not seconds, and it
shares no thread or random state with the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from standin import build_plain

from prism.data.tokens import StreamWriter
from prism.train.language import train_lm
from prism.train.log import read_log
from prism.train.model import Builder
from prism.train.overrides import override
from prism.train.settings import Settings

PATIENCE = 60
"""Seconds until something that must happen is taken not to happen."""


def write_corpus(folder: Path) -> Path:
    """A folder with enough documents that some are held out, and texts that a model can learn something from."""
    folder.mkdir(parents=True)
    lines = [f'{{"text": "{i} bottles, take {i % 7} down, {i - i % 7} bottles left"}}' for i in range(400)]
    (folder / "songs.jsonl").write_text("\n".join(lines))
    return folder


def small(root: Path, **changes: Any) -> Settings:
    """Settings of a run that takes a second; `changes` are nested as in a TOML file."""
    corpus = root / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    base = {
        "out": str(root / "run"),
        "steps": 24,
        "device": "cpu",
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 1, "head_dim": None},
        "data": {"sources": [str(corpus)], "cache": str(root / "cache"), "context": 16},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 4},
        "validation": {"every": 8, "sequences": 6},
        "checkpoint": {"every": 6},
        "log": {"every": 1},
    }
    return override(override(Settings(), base, "base"), changes, "changes")


def losses(run: Path) -> list[tuple[int, float | None]]:
    """What the log says of every step, without what the clock decides."""
    records = read_log(run / "log.jsonl")
    return [(r["step"], r.get("loss"), r.get("gradient_norm"), r.get("validation_nats")) for r in records]


def final_tensors(run: Path) -> dict[str, list[torch.Tensor]]:
    """Everything the newest checkpoint holds: weights, optimiser and random state, each with all of its shards.

    Which of two processes writes a tensor that both have is not fixed, so tensors are not told apart by their file.
    """
    newest = max((run / "checkpoints").glob("step-????????"))
    found: dict[str, list[torch.Tensor]] = {}
    for path in sorted(newest.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found.setdefault(f"{path.parent.name}/{name}", []).append(file.get_tensor(name))
    return found


def same_tensors(a: dict[str, list[torch.Tensor]], b: dict[str, list[torch.Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        len(a[name]) == len(b[name]) and all(map(torch.equal, a[name], b[name])) for name in a
    )


def start(
    settings: Settings, build: Builder = build_plain, processes: int = 1, slow: str | None = None
) -> list[BaseProcess]:
    """Train in children, as torchrun would start them; `slow` gives time to meet them at their "tokens" or "steps"."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["prism.train.language", "prism.models.language", "torch._dynamo", "transformers.tokenization_utils_tokenizers"]
    )
    port = _free_port() if processes > 1 else 0
    children = [
        context.Process(target=_child, args=(settings, build, rank, processes, port, slow)) for rank in range(processes)
    ]
    for child in children:
        child.start()
    return children


def finish(children: list[BaseProcess]) -> list[int | None]:
    """Wait for children; their exit codes."""
    for child in children:
        child.join(PATIENCE)
        assert not child.is_alive(), "a child did not end"
    return [child.exitcode for child in children]


def kill_when(children: list[BaseProcess], moment: Callable[[], bool]) -> None:
    """SIGKILL all children as soon as the moment has come."""
    signal_when(children, moment, signal.SIGKILL)
    assert finish(children) == [-signal.SIGKILL] * len(children), "they were not killed: they had ended before"


def signal_when(children: list[BaseProcess], moment: Callable[[], bool], number: int) -> None:
    wait_until(moment, children)
    for child in children:
        assert child.pid is not None
        os.kill(child.pid, number)


def wait_until(moment: Callable[[], bool], children: list[BaseProcess]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not moment():
        assert time.monotonic() < deadline, "the moment never came"
        assert all(child.is_alive() for child in children), "a child ended before the moment came"
        time.sleep(0.002)


def reached(run: Path, step: int) -> Callable[[], bool]:
    return lambda: any(record["step"] >= step for record in read_log(run / "log.jsonl"))


def _child(settings: Settings, build: Builder, rank: int, processes: int, port: int, slow: str | None) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if slow == "tokens":
        append = StreamWriter.append

        def slow_append(self: StreamWriter, tokens: Any) -> None:
            time.sleep(0.005)
            append(self, tokens)

        StreamWriter.append = slow_append  # type: ignore[method-assign]
    plain = build

    def build_slow(*arguments: Any) -> torch.nn.Module:
        model = plain(*arguments)
        model.register_forward_pre_hook(lambda *_: time.sleep(0.005))
        return model

    train_lm(settings, build_slow if slow == "steps" else build)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
