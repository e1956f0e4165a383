"""Time PRISM (rank 2) and transformers' pure-torch Gated DeltaNet (rank 1) on the CPU, forward and backward.

    python benchmarks/cpu.py                # T = 2048, 8192, 32768; weak and strong decay; writes benchmarks/results/cpu.json
    python benchmarks/cpu.py --channels     # only the rules with a decay per channel; nothing is written

Rules with a decay per channel (KDA, Gated DeltaNet-2, GLA, RWKV-7) are timed at T = 512, next to the pure-torch code of
flash-linear-attention and transformers where those are installed (channel_rules.py), and alone at T = 2048.

Batch 1, 8 heads of 64 × 64, float32. Both run in one process, in turns; figures are the minimum of 7. Peak memory is the
memory that a call adds to the resident set, measured in a separate process. The rows "one core busy" run two threads on two
cores, one of which another process keeps busy; their figures are the median of 15. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import channel_rules
import prism
from common import fastest, typical
from prism.lab.results import write_results
from prism.rules.parts import l2_normalize

HEADS, KEY, VALUE, WRITES = 8, 64, 64, 2
DECAYS = {"weak": 0.02, "strong": 5.0}
BUSY_TOKENS, BUSY_REPEATS = 2048, 15
CHANNEL_TOKENS, CHANNEL_REPEATS = (512, 2048), 3
"""The other libraries take part at the first length only: they need seconds and gigabytes at the second."""


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
        update = prism.Update(x["q"], x["k"], x["w"], x["log_decay"], erase_strength=x["beta"], erase_first=True)
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


def _peak(tokens: int, answer: Connection) -> None:
    run, warm_up = ours(tokens, DECAYS["weak"]), ours(64, DECAYS["weak"])
    warm_up()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which imports have raised
    run()
    status = Path("/proc/self/status").read_text().splitlines()
    answer.send(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024 - before)


def peak_bytes(tokens: int) -> int:
    return in_new_process(_peak, tokens)


def in_new_process(target: Callable[..., None], *arguments: Any) -> Any:
    """Run `target(*arguments, answer)` in a new process, and return what it sends to `answer`."""
    context = multiprocessing.get_context("spawn")
    answer, send = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, send))
    process.start()
    send.close()  # so that `recv` ends if the process does
    try:
        return answer.recv()
    finally:
        process.join()


def _spin(core: int, started: Event) -> None:
    parent = os.getppid()
    os.sched_setaffinity(0, {core})
    started.set()
    while os.getppid() == parent:  # ends with the benchmark, even if that is killed
        pass


@contextmanager
def kept_busy(core: int) -> Iterator[None]:
    """Keep a core busy with another process."""
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_spin, args=(core, started), daemon=True)
    process.start()
    try:
        if not started.wait(timeout=120):
            raise RuntimeError("the process that keeps a core busy did not start within two minutes")
        yield
    finally:
        process.kill()
        process.join()


def _with_busy_core(tokens: int, decay: float, repeats: int, answer: Connection) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, set(cores))  # before torch's first parallel region: its threads inherit it
    torch.set_num_threads(2)
    candidates = {
        "prism_rank2": ours(tokens, decay),
        "prism_rank1": ours(tokens, decay, 1),
        "transformers_rank1": peer(tokens, decay),
    }
    with kept_busy(cores[-1]):
        answer.send(typical(candidates, repeats))


def busy_rows(labels: list[str], repeats: int) -> list[dict[str, Any]]:
    if len(os.sched_getaffinity(0)) < 2:
        print("one core busy: skipped, because this process may use one core only")
        return []
    rows = []
    for label in labels:
        seconds = in_new_process(_with_busy_core, BUSY_TOKENS, DECAYS[label], repeats)
        rows.append(row(label, BUSY_TOKENS, seconds, "one core busy"))
    return rows


def channel_rows() -> list[dict[str, Any]]:
    """Seconds of the rules with a decay per channel, and the ratio to the fastest other library."""
    rows = []
    for rule in channel_rules.RULES:
        for tokens in CHANNEL_TOKENS:
            others = tokens == CHANNEL_TOKENS[0]
            seconds = fastest(channel_rules.candidates(rule, tokens, others), CHANNEL_REPEATS)
            peers = [value for name, value in seconds.items() if name != "prism"]
            ratio = seconds["prism"] / min(peers) if peers else None
            print(f"{rule:>6}  T={tokens:<6}", _rounded(seconds), _ratio(ratio))
            rows.append({"rule": rule, "tokens": tokens, "seconds": seconds, "over_fastest_peer": ratio})
    return rows


def row(label: str, tokens: int, seconds: dict[str, float], condition: str) -> dict[str, Any]:
    peer = seconds.get("transformers_rank1")
    ratio = None if peer is None else seconds["prism_rank2"] / peer
    print(f"{label:>6} decay  T={tokens:<6} {condition:<13}", _rounded(seconds), _ratio(ratio))
    return {"decay": label, "tokens": tokens, "seconds": seconds, "rank2_over_peer_rank1": ratio}


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


def _ratio(ratio: float | None) -> str:
    """For a line of the table; empty where no peer was timed, which takes it minutes."""
    return "" if ratio is None else f"ratio {ratio:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    parser.add_argument("--quick", action="store_true", help="T = 2048 and 8192, weak decay only; nothing is written")
    parser.add_argument(
        "--channels", action="store_true", help="only rules with a decay per channel; nothing is written"
    )
    parser.add_argument("--busy", action="store_true", help="only the rows with one core kept busy; nothing is written")
    arguments = parser.parse_args()

    if arguments.channels:
        channel_rows()
        return
    labels = list(DECAYS)[: 1 if arguments.quick else None]
    rows = []
    for label in [] if arguments.busy else labels:
        decay = DECAYS[label]
        for tokens in (2048, 8192) if arguments.quick else (2048, 8192, 32768):
            candidates = {"prism_rank2": ours(tokens, decay)}
            if tokens <= 8192:  # the peer grows faster than linearly: minutes at 32768
                candidates |= {"prism_rank1": ours(tokens, decay, 1), "transformers_rank1": peer(tokens, decay)}
            rows.append(row(label, tokens, fastest(candidates, arguments.repeats), "idle"))
    busy = busy_rows(labels, BUSY_REPEATS)
    if arguments.quick or arguments.busy:
        return
    channels = channel_rows()
    growth = rows[2]["seconds"]["prism_rank2"] / rows[1]["seconds"]["prism_rank2"]
    memory = {tokens: peak_bytes(tokens) for tokens in (8192, 32768)}
    print({tokens: f"{size / 2**20:.0f} MiB" for tokens, size in memory.items()})
    print(f"time 32768 / 8192: {growth:.2f}    peak memory 32768 / 8192: {memory[32768] / memory[8192]:.2f}")
    results = {
        "timings": rows,
        "one_core_busy": busy,
        "per_channel": channels,
        "time_growth": growth,
        "peak_bytes": memory,
    }
    print("written to", write_results(arguments.output, results, command="python benchmarks/cpu.py"))


if __name__ == "__main__":
    main()
