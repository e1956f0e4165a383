"""The compiled programs of a memory, found by everything that compiled code depends on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from prism.engine.kernels.configurations import Configuration, Tiling
from prism.engine.kernels.paths import INTERPRETED
from prism.engine.kernels.programs import Program, compile_together

_one_thread = threading.Lock()


class Compiled:
    """The programs for one kind of memory: everything that compiled code depends on is the same for all of them."""

    def __init__(self, constants: dict[str, Any], device: torch.device) -> None:
        self.constants, self.device = constants, device
        self.programs: dict[Any, Program] = {}
        self.together: set[tuple[bool, ...]] = set()

    def program(self, kernel: Any, how: Tiling, constants: dict[str, Any]) -> Program:
        key = (kernel, how, *constants.values())
        found = self.programs.get(key)
        if found is None:
            found = self.programs[key] = Program(kernel, {**self.constants, **constants}, how)
        return found

    def compile(self, run: Callable[[], None], *what: bool) -> None:
        """Compile all that `run` starts at once, the first time that it is about to start `what`."""
        if what in self.together or INTERPRETED or self.device.type != "cuda":
            return
        with _one_thread:
            if what not in self.together:
                compile_together(run)
                self.together.add(what)


@lru_cache(256)
def compiled(
    K: int, V: int, J: int, dtype: torch.dtype, device: torch.device,
    erases: bool, tied: bool, strength: bool, decay: bool, documents: bool, how: Configuration,
) -> Compiled:  # fmt: skip
    constants = {
        "J": J,
        "K": K,
        "ERASE": erases,
        "TIED": tied,
        "STRENGTH": strength,
        "DECAY": decay,
        "DOCUMENTS": documents,
        # Half precision products run on tensor cores whatever this says; it rules the few that are float32.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    return Compiled(constants, device)
