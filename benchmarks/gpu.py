"""Measure the kernels on this machine's GPU: accuracy, speed, decoding and the first call.

    python benchmarks/gpu.py                          # accuracy, speed, decoding, first call
    python benchmarks/gpu.py --only accuracy
    python benchmarks/gpu.py --peers                  # also flash-linear-attention; its autotuning takes minutes
    python benchmarks/gpu.py --peers --only speed --subjects gated_delta --widths 128   # some rows of the speed table
    TRITON_INTERPRET=1 python benchmarks/gpu.py --tiny    # a smoke test of the accuracy part on a CPU

Prints one table per part and writes JSON. Accuracy comes first: if any error is more than twice that of torch (accuracy.py),
nothing is timed and the exit status is 1. `--only speed` times without checking.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import accuracy
import accuracy_channels
import accuracy_steps
import speed
import speed_channels
from prism.engine.kernels.available import INTERPRETED
from prism.engine.kernels.memory.configurations import MEASURED, architecture
from prism.lab.results import write_results

PARTS = ("accuracy", "decode", "first-call", "speed")
SUBJECTS = ("gated_delta", "attention", "delta_product", "groups", "comba", *speed_channels.RULES)
WIDTHS = tuple(sorted({shape.width for shape in speed.SHAPES}))
Keep = Callable[[list[dict[str, Any]]], None]
"""Called with all rows so far after each row, so that an interrupted run leaves results."""


def check_all(device: str, tiny: bool, keep: Keep, part: int, parts: int) -> None:
    """Check every case with its default configuration, then every measured configuration explicitly; or one part of them.

    Cases that share kernels are in the same part.
    """
    kinds: dict[tuple[Any, ...], int] = {}

    def mine(*kind: Any) -> bool:
        return kinds.setdefault(kind, len(kinds)) % parts == part

    table = Table("tokens", "L", "K × V", "dtype", "what", "worst kernel / torch", "of", "")
    rows = []

    def note(result: dict[str, Any], *cells: str) -> None:
        worst = max(result["errors"], key=lambda name: _ratio(result["errors"][name]))
        error, verdict = result["errors"][worst], "ok" if result["good"] else "WRONG"
        table.add_row(*cells, f"{error['kernel']:.1e} / {error['torch']:.1e}", worst, verdict)
        print(*cells, f"{error['kernel']:.1e} / {error['torch']:.1e}", worst, verdict, flush=True)
        rows.append(result)
        keep(rows)

    def one(case: accuracy.Case, **options: Any) -> None:
        result = accuracy.check(case, device, **options)
        torch.cuda.empty_cache()
        what = [name for name in ("alike", "packed", "segments") if getattr(case, name)]
        what += [f"decay {case.decay}"] * (case.decay != "weak") + [f"erase {case.erase}"] * (case.erase != "first")
        what += [f"{case.heads} heads, {case.groups} groups"] * (case.groups is not None)
        what += [f"{case.substeps} sub-steps"] * (case.substeps > 1)
        width = f"{case.key_dim} × {case.value_dim}"
        note(result, str(case.tokens), str(case.writes), width, case.dtype, ", ".join(what))

    if part == 0:
        result = accuracy.reference(device)
        note(result, str(accuracy.RECURRENT_UP_TO), "2", "64 × 64", "float64", result["case"]["what"])
    for dtype in (torch.float32,) if tiny else (torch.bfloat16, torch.float32) if part == 0 else ():
        for result in (*accuracy.around_the_memory(device, dtype), *accuracy_steps.layers(device, dtype, tiny)):
            note(result, "", "", "", result["case"]["dtype"], result["case"]["what"])

    def one_by_channel(case: accuracy_channels.ChannelCase, **options: Any) -> None:
        result = accuracy_channels.check(case, device, **options)
        torch.cuda.empty_cache()
        width = f"{case.key_dim} × {case.value_dim}"
        note(result, str(case.tokens), str(case.writes), width, case.dtype, f"per channel, {case.what}")

    if tiny:
        one_by_channel(accuracy_channels.ChannelCase(20, key_dim=16, value_dim=16, dtype="float16", heads=1, groups=1))
        one(accuracy.Case(40, key_dim=16, value_dim=16, dtype="float32", heads=1))
        one(accuracy.Case(40, key_dim=16, value_dim=16, dtype="float32", heads=1, packed=True))
    else:
        for case in accuracy.cases():
            if mine(case.key_dim, case.value_dim, case.writes, case.dtype):
                one(case)
        for each in accuracy_channels.cases():
            if mine("channels", each.key_dim, each.value_dim, each.writes, each.dtype):
                one_by_channel(each)
        here = architecture(torch.device(device))
        for (K, V, writes, where), configuration in MEASURED.items():
            for dtype in ("bfloat16", "float16"):
                if where == here and mine(K, V, writes, dtype):
                    one(accuracy.Case(777, writes, K, V, dtype, alike=True), configuration=configuration, seed=1)
    Console().print(table)


def _ratio(error: dict[str, float]) -> float:
    return error["kernel"] / max(error["torch"], accuracy.FLOOR / 2)


class Row(NamedTuple):
    """A row of the speed table that can be measured."""

    subject: str
    shape: speed.Shape
    what: str
    measure: Callable[[], dict[str, float]]
    floors: Callable[[], tuple[float, float]] | None = None


def speed_rows(have: speed.Ceilings, peers: bool) -> Iterator[Row]:
    """All rows: ours first, then flash-linear-attention's, which autotunes every new width for minutes."""
    first = speed.SHAPES[0]
    wide = [shape for shape in speed.SHAPES if shape.width == 128]
    grouped = [first._replace(heads=heads) for heads in speed.GROUPED]
    for shape in speed.SHAPES:
        for writes in (1, 2, 4):
            floors = partial(_floors, shape, writes, have)
            yield Row("gated_delta", shape, f"PRISM L={writes}", partial(speed.ours, shape, writes), floors)
        yield Row("attention", shape, "softmax attention (SDPA)", partial(speed.attention, shape))
    for shape in wide:
        yield Row("delta_product", shape, "Gated DeltaProduct n=2", partial(speed.ours, shape, 1, substeps=2))
    for shape in grouped:
        measure = partial(speed.ours, shape, 1, groups=first.heads)
        yield Row("groups", shape, f"PRISM L=1, {first.heads} groups", measure)
    for shape in speed_channels.SHAPES:
        for rule in speed_channels.RULES:
            yield Row(rule, shape, rule, partial(speed_channels.ours, shape, rule))
        for writes in (2, 4):  # PRISM that forgets per channel
            yield Row("KDA", shape, f"KDA, L={writes}", partial(speed_channels.ours, shape, "KDA", writes))
    if not peers:
        return
    theirs = speed.flash_linear_attention
    for shape in speed.SHAPES:
        yield Row("gated_delta", shape, "fla Gated DeltaNet", partial(theirs, shape, "gated_delta", 1))
    for shape in speed_channels.SHAPES:
        for rule in speed_channels.RULES:
            yield Row(rule, shape, f"fla {rule}", partial(speed_channels.flash_linear_attention, shape, rule))
    for n, shapes in ((2, wide), (4, wide[:1])):
        for shape in shapes:
            measure = partial(theirs, shape, "delta_product", n)
            yield Row("delta_product", shape, f"fla Gated DeltaProduct n={n}", measure)
    yield Row("comba", wide[0], "PRISM L=2 through fla's Comba", partial(theirs, wide[0], "comba", 2))
    for shape in grouped:
        measure = partial(theirs, shape, "gated_delta", 1, first.heads)
        yield Row("groups", shape, f"fla Gated DeltaNet, {first.heads} groups", measure)


def _floors(shape: speed.Shape, writes: int, have: speed.Ceilings) -> tuple[float, float]:
    return speed.floor(shape, writes, have, False), speed.floor(shape, writes, have, True)


def time_all(chosen: list[Row], keep: Keep) -> None:
    table = Table("shape", "what", "forward ms", "both ms", "forward / floor", "both / floor")
    rows = []
    for row in chosen:
        times, floors = row.measure(), None if row.floors is None else row.floors()
        shares = [""] * 2
        if floors is not None:
            shares = [f"{times[name] / f:.1f}" for name, f in zip(("forward", "both"), floors, strict=True)]
        table.add_row(str(row.shape), row.what, f"{times['forward']:.3f}", f"{times['both']:.3f}", *shares)
        rows.append({"shape": list(row.shape), "what": row.what, **times, "floors": floors})
        keep(rows)
        print(f"{row.shape!s:22} {row.what:32} {times['forward']:.3f} / {times['both']:.3f} ms", flush=True)
    Console().print(table)


def decode_all(have: speed.Ceilings) -> list[dict[str, Any]]:
    table = Table("batch", "called µs", "in a graph µs", "floor µs", "graph / floor")
    rows = []
    for batch in (1, 32, 256):
        times = speed.decode(batch, have)
        share = f"{times['graph'] / times['floor']:.2f}"
        table.add_row(str(batch), *[f"{times[n]:.1f}" for n in ("called", "graph", "floor")], share)
        rows.append({"batch": batch, **times})
    Console().print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run (default: all)")
    parser.add_argument("--peers", action="store_true", help="also time flash-linear-attention")
    parser.add_argument(
        "--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="what is timed (default: all)"
    )
    parser.add_argument(
        "--widths", nargs="+", type=int, choices=WIDTHS, default=WIDTHS, help="head sizes that are timed"
    )
    parser.add_argument(
        "--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"),
        help="run only part I of N of the accuracy cases, counted from 0: parts can run in parallel",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="run a few small cases in Triton's interpreter")
    parser.add_argument("--output", type=Path, help="default: results/gpu.json, or results/gpu-I.json with --part I N")
    arguments = parser.parse_args()
    part, of = arguments.part
    if not 0 <= part < of:
        parser.error(f"--part {part} {of}: I must be 0 to N - 1, and N at least 1")
    if arguments.tiny and not INTERPRETED:
        parser.error("--tiny runs in Triton's interpreter: set TRITON_INTERPRET=1")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("needs a CUDA device (or --tiny with TRITON_INTERPRET=1)")
    parts = arguments.only or (["accuracy"] if arguments.tiny or of > 1 else list(PARTS))
    if parts != ["accuracy"] and (arguments.tiny or of > 1):
        parser.error(f"--{'tiny' if arguments.tiny else 'part'} applies to the accuracy part only: use --only accuracy")
    name = "gpu.json" if of == 1 else f"gpu-{part}.json"
    output = arguments.output or Path(__file__).parent / "results" / name
    results: dict[str, Any] = {}

    def keep(part: str, rows: Any) -> None:
        results[part] = rows
        write_results(output, results, command=shlex.join(sys.argv))

    if "accuracy" in parts:
        device = "cpu" if arguments.tiny else "cuda"
        check_all(device, arguments.tiny, lambda rows: keep("accuracy", rows), *arguments.part)
        wrong = sum(not row["good"] for row in results["accuracy"])
        if wrong:
            sys.exit(f"{wrong} of {len(results['accuracy'])} cases exceed the bound (WRONG above): nothing is timed")
    if {"speed", "decode"} & set(parts):
        have = speed.ceilings()
        keep("ceilings", have._asdict())
    if "decode" in parts:
        keep("decode", decode_all(have))
    if "first-call" in parts:
        keep("first call", speed.first_call())
        print("seconds from an empty compile cache:", results["first call"])
    if "speed" in parts:
        chosen = [
            row
            for row in speed_rows(have, arguments.peers)
            if row.subject in arguments.subjects and row.shape.width in arguments.widths
        ]
        time_all(chosen, lambda rows: keep("speed", rows))


if __name__ == "__main__":
    main()
