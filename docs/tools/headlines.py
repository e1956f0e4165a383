"""Sentences and tables of README, docs/performance.md and docs/kernels.md that quote stored figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_results
from evidence import Evidence
from wording import paragraph, table

from tables import read

CPU = "performance-a-rank-l-write-costs-about-what-rank-1-costs-4"
"""The stored table of CPU times; its last column is rank 2 over transformers."""
LEVEL = 0.95
"""Part of its speed that a model must keep for "does not fall with context"."""


def blocks(evidence: Evidence) -> dict[str, Callable[[], str]]:
    """What writes each block."""
    figures = evidence.figures
    return {
        "state-size": lambda: state(figures),
        "speed-ranks": lambda: ranks(figures["ranks"]["rows"]),
        "speed-channels": channels,
        "speed-cpu": cpu,
        "speed-contexts": lambda: contexts(figures["contexts"]),
        "speed-models": lambda: models(figures["contexts"]),
        "speed-decoding": lambda: decoding(figures),
        "speed-networks": lambda: networks(figures["networks"]),
        "kernel-passes": lambda: passes(figures["kernels"]),
    }


def state(figures: dict[str, Any]) -> str:
    """README's sentence on the memory that decoding needs."""
    rows = figures["state"]["rows"]
    ours, cache = max(rows["PRISM, Gated DeltaNet"]), rows["Transformer"][-1]
    assert kept(figures["contexts"], "PRISM, rank 2") > LEVEL
    return paragraph(
        "Training speed does not fall with context. Decoding does not slow down either: the state stays at",
        f"{ours} MiB per row, while the Transformer's cache grows to {cache / 1024:.1f} GiB.",
    )


def ranks(rows: dict[str, list[float | None]]) -> str:
    ours, unrolled = rows["ours, rank 2"], rows["fla, DeltaProduct n = 2"]
    known = [one for one in ours if one is not None]
    faster = [
        theirs / one for one, theirs in zip(ours, unrolled, strict=True) if one is not None and theirs is not None
    ]
    return paragraph(
        f"**{'It holds' if max(known) <= 1 else 'It does not hold'}.** Forward and backward of rank 2 take",
        f"{min(known):.2f} to {max(known):.2f} of the time of the peer's rank 1. Rank 2 is",
        f"{' and '.join(f'{one:.1f}' for one in faster)} times as fast as two sub-steps of DeltaProduct.",
    )


def channels() -> str:
    low, high = gpu_results.channel_span()
    return paragraph(
        f"**A decay per key channel** has kernels too: {low:.2f} to {high:.2f} of the time of the peer's. Milliseconds,",
        "forward / forward and backward, and ratios to the peer's, of the same run and process.",
        f"`{gpu_results.command('gpu_memories')}`",
    )


def cpu() -> str:
    stored = read()[CPU]
    assert stored["header"][-1] == "rank 2 / transformers", stored["header"]
    shares = [float(row[-1]) for row in stored["rows"] if row[-1]]
    return paragraph(
        f"**On a CPU.** Rank 2 takes {min(shares):.2f} to {max(shares):.2f} of the time of transformers' pure-torch rank 1.",
        "Forward and backward, batch 1, 8 heads of 64 × 64, milliseconds. `make bench`",
    )


def thousands(context: int) -> str:
    """`128K`"""
    return f"{context // 1024}K"


def kept(figure: dict[str, Any], model: str) -> float:
    """The share of its speed at the shortest context that a model has at the longest."""
    speeds = figure["rows"][model][: len(figure["contexts"])]
    return float(speeds[-1] / speeds[0])


def contexts(figure: dict[str, Any]) -> str:
    ours, peer, attention = (
        kept(figure, name) for name in ("PRISM, rank 2", "Gated DeltaNet on fla's kernels", "Transformer")
    )
    return paragraph(
        f"**{'It holds' if ours > LEVEL else 'It does not hold'}.** Rank 2 keeps {ours:.2f} of its speed from",
        f"{thousands(figure['contexts'][0])} to {thousands(figure['contexts'][-1])} tokens; the peer keeps {peer:.2f} and the",
        f"Transformer {attention:.2f}.",
    )


def models(figure: dict[str, Any]) -> str:
    count = len(figure["contexts"])
    first, second, peer, attention = (
        figure["rows"][name][:count]
        for name in ("Gated DeltaNet", "PRISM, rank 2", "Gated DeltaNet on fla's kernels", "Transformer")
    )
    passed = next(place for place in range(1, count) if second[place] > attention[place])
    assert second[passed - 1] <= attention[passed - 1]
    between = " and ".join(thousands(figure["contexts"][place]) for place in (passed - 1, passed))
    over = [f"{one / other:.2f}" for one, other in zip(second, peer, strict=True)]
    rank_1 = [one / other for one, other in zip(first, peer, strict=True)]
    return paragraph(
        f"- In the first table rank 2 is {', '.join(over[:-1])} and {over[-1]} times as fast as the peer's rank-1 model, and",
        f"passes the Transformer between {between}. Rank 1 is {min(rank_1):.2f} to {max(rank_1):.2f} times as fast as the",
        f"peer. Rank 1 keeps {kept(figure, 'Gated DeltaNet'):.2f} of its speed, rank 4 {kept(figure, 'PRISM, rank 4'):.2f}.",
        indent="  ",
    )


def decoding(figures: dict[str, Any]) -> str:
    sizes, step = figures["state"]["rows"]["PRISM, Gated DeltaNet"], figures["decoding"]["rows"]["PRISM, rank 2"][0]
    verdict = "It holds" if len(set(sizes)) == 1 else "It does not hold"
    before = read()["performance-decoding-1"]["rows"][0][1].split()[0]
    return paragraph(
        f"**A token costs the same after any context. {verdict},** with a state of {sizes[0]} MiB per row. A step of 32 rows",
        f"takes {step:.2f} ms, where it took {before} ms when the table was made: a layer is now seven kernels",
        "([kernels](kernels.md#around-the-memory)).",
    )


def networks(figure: dict[str, Any]) -> str:
    rows = figure["rows"]
    ours = rows["PRISM, rank 2"][0]
    serial, chunked, linear = (
        f"{ours / rows[name][0]:.2g}"
        for name in (
            "TTT-MLP, serial, one fused kernel",
            "TTT-MLP, mini-batches of 16",
            "TTT-Linear, mini-batches of 16",
        )
    )
    assert float(serial) < figure["paper"]
    return paragraph(
        f"**{serial} times, not {figure['paper']}.** The paper's headline is {figure['paper']} times. Here rank 2 is {serial}",
        f"times as fast as a serial TTT-MLP that is one fused kernel, {chunked} times as fast as the chunked one, and",
        f"{linear} times as fast as chunked TTT-Linear.",
    )


def passes(figure: dict[str, Any]) -> str:
    """Each pass of the kernels with the least time that its bytes and operations take."""
    rows = [
        [name, *figure["per token and head"][name], f"{floor:.2f}", f"{measured:.3f}"]
        for name, (floor, measured) in figure["rows"].items()
    ]
    return table(["pass", "bytes", "operations", "floor ms", "measured ms"], rows)
