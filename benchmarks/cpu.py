"""PRISM (rank 2) beside transformers' pure-torch Gated DeltaNet (rank 1) on the CPU, forward and backward.

    python benchmarks/cpu.py                # T = 2048, 8192, 32768; weak and strong decay; writes benchmarks/results/cpu.json

Batch 1, 8 heads of 64 × 64, float32. Both run in one process, taking turns; figures are the minimum of 7. Peak memory is
what a call adds to what was resident before it, measured in a process of its own. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import prism
from common import fastest
from prism.reports.results import write_results
from prism.rules.parts import l2_normalize

HEADS, KEY, VALUE, WRITES = 8, 64, 64, 2
DECAYS = {"weak": 0.02, "strong": 5.0}


def inputs(tokens: int, decay: float, writes: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shape = (1, tokens, HEADS)
    leaves = {
        "q": l2_normalize(torch.randn(*shape, KEY)),
        "k": l2_normalize(torch.randn(*shape, writes, KEY)),
        "w": torch.randn(*shape, writes, VALUE),
        "log_decay": -decay * torch.rand(*shape),
        "beta": torch.rand(*shape),
    }
    return {name: x.requires_grad_() for name, x in leaves.items()}


def ours(tokens: int, decay: float, writes: int = WRITES) -> Callable[[], None]:
    x = inputs(tokens, decay, writes)

    def run() -> None:
        update = prism.Update(
            x["q"], x["k"], x["w"], x["log_decay"], erase_key=x["k"][..., 0, :], erase_strength=x["beta"]
        )
        o, _ = prism.memory(update, form="chunkwise", backend="torch")
        torch.autograd.grad(o.sum(), list(x.values()))

    return run


def peer(tokens: int, decay: float) -> Callable[[], None]:
    from transformers.models.qwen3_next import modeling_qwen3_next

    rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    x = inputs(tokens, decay, 1)

    def run() -> None:
        o, _ = rule(x["q"], x["k"].squeeze(3), x["w"].squeeze(3), x["log_decay"], x["beta"], output_final_state=True)
        torch.autograd.grad(o.sum(), list(x.values()))

    return run


def _peak(tokens: int, queue: multiprocessing.Queue) -> None:
    run, warm_up = ours(tokens, DECAYS["weak"]), ours(64, DECAYS["weak"])
    warm_up()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak that imports left behind
    run()
    status = Path("/proc/self/status").read_text().splitlines()
    queue.put(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024 - before)


def peak_bytes(tokens: int) -> int:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak, args=(tokens, queue))
    process.start()
    result = queue.get()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    parser.add_argument("--quick", action="store_true", help="T = 2048 and 8192, weak decay only; nothing is written")
    arguments = parser.parse_args()

    rows = []
    for label, decay in list(DECAYS.items())[: 1 if arguments.quick else None]:
        for tokens in (2048, 8192) if arguments.quick else (2048, 8192, 32768):
            candidates = {"prism_rank2": ours(tokens, decay)}
            if tokens <= 8192:  # the peer grows faster than linearly: minutes at 32768
                candidates |= {"prism_rank1": ours(tokens, decay, 1), "transformers_rank1": peer(tokens, decay)}
            seconds = fastest(candidates, arguments.repeats)
            ratio = seconds["prism_rank2"] / seconds.get("transformers_rank1", float("nan"))
            rows.append({"decay": label, "tokens": tokens, "seconds": seconds, "rank2_over_peer_rank1": ratio})
            print(
                f"{label:>6} decay  T={tokens:<6}", {k: round(v, 4) for k, v in seconds.items()}, f"ratio {ratio:.3f}"
            )
    if arguments.quick:
        return
    growth = rows[2]["seconds"]["prism_rank2"] / rows[1]["seconds"]["prism_rank2"]
    memory = {tokens: peak_bytes(tokens) for tokens in (8192, 32768)}
    print({tokens: f"{size / 2**20:.0f} MiB" for tokens, size in memory.items()})
    print(f"time 32768 / 8192: {growth:.2f}    peak memory 32768 / 8192: {memory[32768] / memory[8192]:.2f}")
    results = {"timings": rows, "time_growth": growth, "peak_bytes": memory}
    print("written to", write_results(arguments.output, results, command="python benchmarks/cpu.py"))


if __name__ == "__main__":
    main()
