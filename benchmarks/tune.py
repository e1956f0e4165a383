"""Measure tilings on this machine's GPU and print rows for `src/prism/engine/kernels/memory/configurations.py`.

    python benchmarks/tune.py --widths 64 128 --writes 1 2 4
    python benchmarks/tune.py --widths 256 --writes 2 --blocks 32 64

Kernel by kernel, every tiling that compiles is timed and the fastest is taken. The result is checked against float64 before it
is printed; a row that fails the check is printed as a comment. Nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import accuracy
import speed
from prism.engine.kernels.memory.configurations import Configuration, Tiling, architecture, configuration, forced
from prism.engine.kernels.memory.launch import KernelInputs, Launch


def time_kernels(u: KernelInputs, d_o: torch.Tensor, chosen: Configuration, name: str) -> float:
    """Milliseconds of the pass that `name` configures, after one run of all passes; of all passes for `step`."""
    with forced(replace(chosen, segments=1)):
        run = Launch(u)
        tables = run.prepare(segments=1)
        o, d_w = run.empty(run.B, run.T, run.H, run.V), torch.empty_like(u.w)
        states = run.empty(run.B, run.H, run.chunks, run.V, run.K)
        fed, d_states = torch.empty_like(o), torch.empty_like(states)
        passes = {
            "prepare_warps": lambda: run.prepare(segments=1),
            "forward_scan": lambda: run.forward_scan(tables, None, 1, o=o, states=states, fed=fed),
            "backward_scan": lambda: run.backward_scan(tables, d_o, None, 1, d_states, d_w),
            "tokens": lambda: run.token_gradients(tables, states, fed, d_o, d_states, d_w, None, None),
        }
        for run_pass in passes.values():
            run_pass()
        if name == "step":
            return sum(speed.milliseconds(run_pass) for run_pass in passes.values())
        return speed.milliseconds(passes.get(name, passes["tokens"]))


def tune(width: int, writes: int, arguments: argparse.Namespace) -> Configuration:
    """The fastest configuration, one field after the other."""
    shape = speed.Shape(8, 4096, 16, width)
    q, k, w, g, beta, d_o = (x.detach() for x in speed.inputs(shape, writes))
    u = KernelInputs(q, k, w, g, None, beta, None)
    best = configuration(width, width, writes, w.dtype, w.device)
    blocks = sorted({min(b, width) for b in arguments.blocks})
    tilings = [Tiling(*t) for t in product(blocks, arguments.warps, arguments.stages)]
    capped = [replace(t, registers=r or None) for t, r in product(tilings, arguments.registers)]
    candidates: dict[str, list[Any]] = {"step": [16, 32], "prepare_warps": [1, 2, 4]}
    candidates |= {
        "forward_scan": tilings,
        "backward_scan": tilings,
        "backward_queries": capped,
        "backward_writes": capped,
    }
    for name, choices in candidates.items():
        times = {}
        for choice in choices:
            try:
                times[choice] = time_kernels(u, d_o, replace(best, **{name: choice}), name)
            except Exception as error:  # a tiling may need too much shared memory, or not compile
                if "illegal" in str(error):  # the CUDA context is lost
                    raise SystemExit(
                        f"{name} {choice} was compiled wrongly: {error}\n"
                        "Exclude it with --blocks, --warps, --stages or --registers, and run again."
                    ) from error
                print(f"  {name} {choice}: {type(error).__name__}", flush=True)
                continue
            print(f"  {name} {choice}: {times[choice]:.3f} ms", flush=True)
        if times:
            best = replace(best, **{name: min(times, key=times.__getitem__)})
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128], help="K = V")
    parser.add_argument("--writes", nargs="+", type=int, default=[1, 2, 4], help="writes per token: columns")
    parser.add_argument("--blocks", nargs="+", type=int, default=[64, 128], help="value channels per tile")
    # Eight warps are best in some scans over 128 values (--blocks 128 --warps 8). They are not a default because Triton 3.6
    # compiled other tilings of the forward scan with 4 columns into an illegal access, which ends the process.
    parser.add_argument("--warps", nargs="+", type=int, default=[4], help="warps per program")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3], help="loads prefetched")
    parser.add_argument(
        "--registers",
        nargs="+",
        type=int,
        default=[0, 168, 128],
        help="upper bounds of registers per thread in the parallel passes (0: no bound)",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    where = architecture(torch.device("cuda"))
    for width, writes in product(arguments.widths, arguments.writes):
        print(f"K = V = {width}, {writes} writes", flush=True)
        best = tune(width, writes, arguments)
        cases = [
            accuracy.Case(tokens, writes, width, width, alike=alike) for tokens, alike in ((777, True), (65, False))
        ]
        good = all(accuracy.check(case, "cuda", best)["good"] for case in cases)
        print(f"{'' if good else '# fails the float64 check: '}    ({width}, {width}, {writes}, {where!r}): {best},")


if __name__ == "__main__":
    main()
