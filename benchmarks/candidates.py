"""Speed up Triton's autotuner: compile all candidates of a kernel in parallel, and time each for 10 ms instead of 100.

Triton's autotuner compiles a candidate, times it, and continues with the next; flash-linear-attention's operators take
minutes that way. Uses private functions of Triton, which a benchmark may do; the library itself does so in
`prism/engine/kernels/compat.py` only.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch


def compile_candidates_together() -> None:
    """Patch the autotuner of this process."""
    import triton
    from triton.runtime.autotuner import Autotuner

    if getattr(Autotuner.prune_configs, "together", False):
        return
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, options: dict[str, Any]) -> list[Any]:
        chosen = prune(self, options)
        device = torch.cuda.current_device()
        with ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)) as threads:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                each = [{**options, **candidate.all_kwargs(), "warmup": True} for candidate in chosen]
                waiting = [self.fn.run(*self.nargs.values(), **every) for every in each]
            list(threads.map(_build_launcher, waiting))
        return chosen

    prune_and_compile.together = True  # type: ignore[attr-defined]
    Autotuner.prune_configs = prune_and_compile
    brief = partial(triton.testing.do_bench, warmup=3, rep=10)
    Autotuner.do_bench = property(lambda self: brief, lambda self, given: None)


def _build_launcher(waiting: Any) -> None:
    kernel = waiting.result(ignore_errors=True) if hasattr(waiting, "result") else waiting
    try:
        _ = kernel.run
    except Exception:  # too much shared memory, for example: the autotuner will find out
        return
