"""Tables of GPU benchmarks, from the results of single runs in experiments/results.

`gpu_ranks.json`, `gpu_memories.json` and `gpu_accuracy.json` are outputs of `benchmarks/gpu.py` and `gpu_models*.json` of
`benchmarks/throughput.py`, each with its command and machine. All times of a file are from one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wording import joined, paragraph, table

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
PEER = "fla Gated DeltaNet"
CHANNEL_RULES = ("KDA", "Gated DeltaNet-2", "GLA", "RWKV-7")
MODELS = {
    "prism-2": "**PRISM, rank 2**",
    "transformer": "Transformer",
    "gated_delta-fla-layer": "Gated DeltaNet, fla's layer in our model",
}


def read(name: str) -> Any:
    """The results in a file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def command(name: str) -> str:
    """The command that made the results in a file."""
    return str(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["command"])


def cores(name: str) -> int:
    """The cores of the machine that made the results in a file."""
    return int(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["machine"]["cores"])


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}×"


def _memories(name: str, pairs: list[tuple[str, str, str]]) -> str:
    """Milliseconds of forward / both passes, and their ratios to a peer: rows of (label, what was timed, its peer)."""
    times = {(tuple(row["shape"]), row["what"]): row for row in read(name)["speed"]}
    shapes = list(dict.fromkeys(shape for shape, _ in times))

    def cell(shape: tuple[int, ...], what: str, peer: str) -> str:
        row, other = times[shape, what], times[shape, peer]
        milliseconds = f"{row['forward']:.2f} / {row['both']:.2f}"
        if what == peer:
            return milliseconds
        return f"{milliseconds}, {ratio(row['forward'], other['forward'])} / {ratio(row['both'], other['both'])}"

    header = ["memory", *["(" + ", ".join(map(str, shape)) + ")" for shape in shapes]]
    return table(header, [[label, *[cell(shape, what, peer) for shape in shapes]] for label, what, peer in pairs])


def ranks() -> str:
    ours = [(f"ours, rank {L}", f"PRISM L={L}", PEER) for L in (1, 2, 4)]
    return _memories("gpu_ranks", [*ours, ("peer, rank 1", PEER, PEER)])


def channels() -> str:
    return _memories(
        "gpu_memories",
        [
            pair
            for rule in CHANNEL_RULES
            for pair in ((rule, rule, f"fla {rule}"), (f"fla, {rule}", *[f"fla {rule}"] * 2))
        ],
    )


def channel_span() -> tuple[float, float]:
    """The smallest and the largest ratio of both passes to the peer's, over rules with a decay per channel and shapes."""
    times = {(tuple(row["shape"]), row["what"]): row["both"] for row in read("gpu_memories")["speed"]}
    shares = [both / times[shape, f"fla {what}"] for (shape, what), both in times.items() if what in CHANNEL_RULES]
    return min(shares), max(shares)


def models() -> str:
    rows = {row["model"]: row for row in read("gpu_models")["training"]}
    first = rows["prism-2"]["tokens_per_second"]
    cells = [
        [label, f"{speed / 1e3:.0f}", f"{first / speed:.2f}", f"{rows[name]['peak_bytes'] / 2**30:.0f} GiB"]
        for name, label in MODELS.items()
        if (speed := rows[name]["tokens_per_second"])
    ]
    over = {name: f"{first / row['tokens_per_second']:.2f}" for name, row in rows.items()}
    kernel = {row["model"]: row["tokens_per_second"] for row in read("gpu_models_kernel")["training"]}
    said = paragraph(
        f"`{command('gpu_models')}`, one process. The last column but one is rank 2's speed over the model's.",
        f"**Rank 2 makes {over['transformer']} times the Transformer's tokens** and {over['gated_delta-fla-layer']} times",
        "those of Gated DeltaNet on fla's kernels. In an earlier process, with earlier kernels, it made",
        f"{kernel['prism-2'] / kernel['fla-gated_delta']:.2f} times those of fla's own whole model, and",
        f"{kernel['prism-2'] / kernel['gated_delta-fla']:.2f} times those of Gated DeltaNet with our kernels for everything",
        f"but the memory: `{command('gpu_models_kernel')}`.",
    )
    return joined(table(["model", "thousand tokens/s at 2K", "rank 2 makes", "peak memory"], cells), said)


def channel_model() -> str:
    """What decays per channel cost a whole model in training."""
    rows = {row["model"]: row for row in read("gpu_models_channel")["training"]}
    head, channel = rows["prism-2"], rows["prism-2-channel"]
    speed, memory = (channel[what] / head[what] for what in ("tokens_per_second", "peak_bytes"))
    return paragraph(
        f"Decays per channel cost speed and memory: a model of {channel['parameters'] / 1e6:.0f} M parameters trains at",
        f"{speed:.2f} of the speed of the default, with {memory:.1f} times its peak memory (H200,",
        f"`{command('gpu_models_channel')}`).",
    )


def long_context() -> str:
    """How much of its speed rank 2 keeps from 2K to 128K tokens."""
    short, long = (row["tokens_per_second"] for row in read("gpu_models_128k")["training"])
    speeds = f"{short / 1e3:.0f} thousand tokens/s at 2K and {long / 1e3:.0f} at 128K"
    return f"In one run, rank 2 makes {speeds}: {long / short:.3f}."


def first_call() -> str:
    """What the first call of a process costs with an empty compile cache, and what later shapes cost."""
    seconds = read("gpu_ranks")["first call"]
    later = max(time for name, time in seconds.items() if name != "first")
    return paragraph(
        "First forward and backward from an empty compile cache, import excluded:",
        f"{seconds['first']:.1f} s on {cores('gpu_ranks')} cores for K = V = 128, L = 2 (`{command('gpu_ranks')}`).",
        "After that nothing is compiled for another length, batch or number of heads, or for a sequence so long",
        f"that it runs as segments: at most {1000 * later:.0f} ms.",
    )


def accuracy() -> str:
    """How far the kernels' errors are from torch's, over all accuracy cases on the chip."""
    cases = read("gpu_accuracy")["accuracy"]
    within = sum(row["good"] for row in cases)
    half = [e["kernel"] / e["torch"] for row in cases if "16" in row["case"]["dtype"] for e in row["errors"].values()]
    single = [e["kernel"] for row in cases if row["case"]["dtype"] == "float32" for e in row["errors"].values()]
    return paragraph(
        f"`{command('gpu_accuracy')}`: {within} of {len(cases)} cases are within twice torch's error against float64",
        f"in every output, state and gradient. The largest ratio in 16 bits is {max(half):.2f}; in float32, where",
        f"differences below 2e-6 are not judged by their ratio, the largest error is {max(single):.1e}.",
    )


def whole_call() -> str:
    """The times of a call of rank 2 at the first shape, next to the floor of a forward."""
    found = read("gpu_ranks")
    row = next(row for row in found["speed"] if row["what"] == "PRISM L=2")
    floor, ceilings = row["floors"][0], found["ceilings"]
    return paragraph(
        f"Forward and backward take {row['both']:.2f} ms. A forward without a backward takes {row['forward']:.2f} ms,",
        f"{row['forward'] / floor:.1f} times the floor of the computation itself ({floor:.2f} ms: read q, keys and values,",
        f"write o). In that run a copy moves {ceilings['bytes'] / 1e12:.2f} TB/s and a large product makes",
        f"{ceilings['operations'] / 1e12:.0f} TFLOP/s (`{command('gpu_ranks')}`).",
    )


ERRORS = {
    "o": "o",
    "state": "state",
    "d_q": "dq",
    "d_k": "dk",
    "d_w": "dw",
    "d_log_decay": "dg",
    "d_erase_strength": "dβ",
    "d_state": "d state",
}
PLAIN = {"tokens": 1000, "writes": 2, "key_dim": 128, "dtype": "bfloat16", "decay": "weak"}
"""The accuracy case that docs/kernels.md shows in full."""


def errors() -> str:
    """Relative errors of the kernels and of torch in one case."""
    cases = read("gpu_accuracy")["accuracy"]
    (shown,) = (row["errors"] for row in cases if PLAIN.items() <= row["case"].items())
    rows = [
        [label, *[f"{1000 * shown[name][which]:.1f}" for name in ERRORS]]
        for which, label in (("kernel", "kernels"), ("torch", "torch, bfloat16 products"))
    ]
    said = f"Relative errors against float64, {PLAIN['tokens']:,} tokens, rank 2, K = V = 128, in units of 10⁻³:"
    return joined(said, table(["bfloat16", *ERRORS.values()], rows))


def blocks() -> dict[str, Any]:
    """What writes each block."""
    return {
        "kernel-call": whole_call,
        "kernel-errors": errors,
        "gpu-ranks": ranks,
        "gpu-channels": channels,
        "gpu-models": models,
        "gpu-channel-model": channel_model,
        "gpu-long-context": long_context,
        "gpu-first-call": first_call,
        "gpu-accuracy": accuracy,
    }
