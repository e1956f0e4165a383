"""The device that a name stands for, and a warning where torch's threads exceed the idle cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SECONDS = 0.1
"""How long `busy_cores` observes the machine."""
_warned = False


def pick_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` and so on; it is tried out before it is returned.

    `auto` is cuda if available. Under torchrun, `cuda` is the GPU of this process (`LOCAL_RANK`).
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Take subnormal numbers for zero on the CPU, in this thread and those that it starts; also as a decorator.

    What a memory has almost forgotten becomes so small, and then every product with it takes many times as long.
    """
    before = bool(torch.tensor(1e-30) * 1e-10 == 0)  # torch cannot be asked
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def warn_if_crowded(say: Callable[[str], None]) -> None:
    """Warn, once per process, if torch has more threads than there are idle cores.

    Its threads then wait for each other, and training becomes many times slower.
    """
    global _warned
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if _warned or threads == 1:
        return
    idle = max(0.0, cores - busy_cores())
    if threads > idle + 0.5:
        _warned = True
        say(
            f"warning: torch uses {threads} threads, but only about {idle:.0f} of {cores} cores are idle, which can make "
            "training many times slower: set OMP_NUM_THREADS=1, or wait for the other processes"
        )


def busy_cores() -> float:
    """Number of cores that other processes use now; without /proc/stat, the system's load average over one minute."""
    before = _ticks()
    if before is None:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    time.sleep(_SECONDS)  # this process is idle meanwhile
    after = _ticks() or before
    total, idle = after[0] - before[0], after[1] - before[1]
    return (os.cpu_count() or 1) * (total - idle) / total if total else 0.0


def _ticks() -> tuple[int, int] | None:
    """Clock ticks of all cores since boot, (total, idle); None if there is no /proc/stat."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, idle, waiting, *rest = (int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9])
    return user + nice + system + idle + waiting + sum(rest), idle + waiting
