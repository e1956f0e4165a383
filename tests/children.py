"""Training runs in children that can be killed, and what they leave behind.

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

from prism.train.run import read_log

PATIENCE = 60
"""Seconds until something that must happen is taken not to happen."""
IMPORTED_ONCE = [
    "prism.language.task",
    "prism.recommend.task",
    "prism.models.language",
    "prism.serve.rec.app",
    "prism.serve.run",
    "prism.cli.serve",
    "prism.cli.flags",
    "torch._dynamo",
    "transformers.tokenization_utils_tokenizers",
]


def start_children(work: Callable[..., None], *arguments: Any, processes: int = 1) -> list[BaseProcess]:
    """`work(*arguments)` in this many children, as torchrun would start them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    port = free_port() if processes > 1 else 0
    children = [
        context.Process(target=_child, args=(rank, processes, port, work, arguments)) for rank in range(processes)
    ]
    for child in children:
        child.start()
    return children


def _child(rank: int, processes: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    work(*arguments)


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


def final_tensors(run: Path) -> dict[str, list[torch.Tensor]]:
    """All tensors of the newest checkpoint."""
    return checkpoint_tensors(max((run / "checkpoints").glob("step-????????")))


def checkpoint_tensors(folder: Path) -> dict[str, list[torch.Tensor]]:
    """All tensors of a checkpoint: weights, optimizer and random state, each with all of its shards.

    Which of two processes writes a tensor that both have is not fixed, so tensors are not distinguished by their file.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                found.setdefault(f"{path.parent.name}/{name}", []).append(file.get_tensor(name))
    return found


def same_tensors(a: dict[str, list[torch.Tensor]], b: dict[str, list[torch.Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        len(a[name]) == len(b[name]) and all(map(torch.equal, a[name], b[name])) for name in a
    )


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
