"""A warning where torch uses more threads than there are idle cores: they wait for each other, and training crawls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

_SECONDS = 0.1
"""How long the machine is watched."""
_said = False


def warn_if_crowded(say: Callable[[str], None]) -> None:
    """Say, once a process and in one line, that other processes need the cores that torch's threads count on."""
    global _said
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if _said or threads == 1:
        return
    idle = max(0.0, cores - busy_cores())
    if threads > idle + 0.5:
        _said = True
        say(
            f"warning: torch uses {threads} threads, but only about {idle:.0f} of {cores} cores are idle, which can make "
            "training many times slower: set OMP_NUM_THREADS=1, or wait for the other processes"
        )


def busy_cores() -> float:
    """How many cores other processes keep busy just now; where the system does not say, their mean over a minute."""
    before = _ticks()
    if before is None:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    time.sleep(_SECONDS)  # this process does nothing meanwhile
    after = _ticks() or before
    total, idle = after[0] - before[0], after[1] - before[1]
    return (os.cpu_count() or 1) * (total - idle) / total if total else 0.0


def _ticks() -> tuple[int, int] | None:
    """Clock ticks of all cores since the start of the system, all and idle ones; None where there is no /proc/stat."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, idle, waiting, *rest = (int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9])
    return user + nice + system + idle + waiting + sum(rest), idle + waiting
